"""The model as transformers' users know it: `from_pretrained`, `forward`, `generate`, `save_pretrained`."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.utils import logging

from custom_ops.bridge import current_platform
from torchqwen_tpu.cache import CacheLayout, HybridCache
from torchqwen_tpu.checkpoint.atomic import replaced_checkpoint
from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.forms import prepare, set_parameter
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import SCALE
from torchqwen_tpu.checkpoint.preparation import LAYOUT_VERSION, Preparation, checkpoint_hash, quantization_of
from torchqwen_tpu.checkpoint.prepared import PreparedFiles, load_prepared, new_prepared, prepared_folder
from torchqwen_tpu.checkpoint.publish import FORMATS, Publisher, quantization_settings
from torchqwen_tpu.checkpoint.reader import Place, is_head_tied, load_parameters
from torchqwen_tpu.checkpoint.resolve import (
    check_family,
    check_quantization,
    load_config,
    load_generation_config,
    resolve_folder,
)  # fmt: skip
from torchqwen_tpu.checkpoint.stacks import Stacks
from torchqwen_tpu.checkpoint.writer import Saved, write_weights
from torchqwen_tpu.config import ParallelConfig, RuntimeConfig
from torchqwen_tpu.inputs import check_embeddings, check_ids, columns_of, limit_of
from torchqwen_tpu.models.layers import Linear
from torchqwen_tpu.models.qwen3_5 import TextModel
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.parallel import build_mesh
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.parallel.rules import parameter_axes
from torchqwen_tpu.runtime.generation import Generation
from torchqwen_tpu.runtime.packing import Selected, extend
from torchqwen_tpu.runtime.step import Steps

logger = logging.get_logger(__name__)

DEFAULT_QUANTIZATION = {"cpu": "dequantize", "tpu": "channel"}
"""What becomes of FP8 weights, by platform (see `RuntimeConfig.quantization`)."""
_HUB_ARGUMENTS = ("revision", "cache_dir", "token", "local_files_only", "force_download")
_IGNORED_ARGUMENTS = (
    "_from_auto", "adapter_kwargs", "trust_remote_code", "low_cpu_mem_usage", "use_safetensors", "weights_only",
)  # fmt: skip
"""Arguments that transformers' Auto classes hand through and that change nothing here."""


class CausalLM(Generation, PreTrainedModel, GenerationMixin):
    """A Qwen 3.5 text model with its language-model head, on XLA devices.

    Made by `from_pretrained`. It computes without gradients.
    """

    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _is_stateful = True
    output_type = CausalLMOutputWithPast

    def __init__(self, config: PretrainedConfig, scan_layers: bool = False):
        check_family(config.model_type, "the configuration")
        super().__init__(config.get_text_config())
        self.checkpoint_config = config
        self.model = TextModel(self.config, scan_layers)
        self.lm_head = None if self.config.tie_word_embeddings else Linear(self.config.hidden_size, self.config.vocab_size)
        self.vocab_size = self.config.vocab_size
        self._files: CheckpointFiles | None = None
        self.requantization_error: dict[str, float] = {}
        self._steps: Steps | None = None
        self.register_state_dict_post_hook(_publish)
        self.register_load_state_dict_pre_hook(_unpublish)

    def _check_and_adjust_experts_implementation(self, experts_implementation: str | None) -> str | None:
        """transformers' hook: a choice that its own model left in the configuration means nothing here."""
        return experts_implementation

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        config: PretrainedConfig | None = None,
        dtype: torch.dtype | str | None = None,
        parallel: ParallelConfig | None = None,
        runtime: RuntimeConfig | None = None,
        save_prepared: str | os.PathLike | None = None,
        **kwargs,
    ) -> CausalLM:
        """Load a checkpoint onto the devices.

        Args:
            pretrained_model_name_or_path: a folder, published or prepared, or a model id of the Hugging Face hub.
            config: in place of the checkpoint's own, for example with changed RoPE parameters.
            dtype: of the weights, a torch dtype, its name, or "auto" (the default) for the checkpoint's.
            parallel: layout over devices; by default all attached devices, data-parallel.
            runtime: how the model runs.
            save_prepared: folder for the weights in the form that the devices hold. The first start writes it; further ones
                read it in place of converting, and are refused if it was made of another checkpoint, or for another dtype,
                quantization, scan_layers or mesh. It is complete, and may be loaded by itself.
            kwargs: revision, cache_dir, token, local_files_only and force_download for the hub.

        Raises:
            FileNotFoundError: no such folder, and no such model on the hub.
            ValueError: another family, an unknown dtype or argument.
            CheckpointError: files that are damaged or do not fit the model.
        """
        hub = {name: kwargs.pop(name) for name in _HUB_ARGUMENTS if name in kwargs}
        dtype = kwargs.pop("torch_dtype", dtype)
        _refuse_unknown(kwargs)
        folder = resolve_folder(pretrained_model_name_or_path, **hub)
        config = copy.deepcopy(config) if config is not None else load_config(folder)
        check_family(config.model_type, "the configuration")
        check_quantization(config, folder)
        dtype = _resolve_dtype(dtype, config)
        mesh, runtime = build_mesh(parallel), runtime or RuntimeConfig()
        target = None if save_prepared is None else Path(save_prepared).expanduser()
        ready = prepared_folder(folder, target)
        if ready == folder:  # what is not asked for is as it was prepared
            files = prepared = PreparedFiles(folder)
            scan_layers, policy = prepared.preparation.scan_layers, runtime.quantization
        else:
            files, prepared = CheckpointFiles(folder), PreparedFiles(ready) if ready else None
            scan_layers = current_platform() == "tpu"
            policy = runtime.quantization or DEFAULT_QUANTIZATION[current_platform()]
        scan_layers = scan_layers if runtime.scan_layers is None else runtime.scan_layers
        model = cls.without_weights(config, files, scan_layers)
        check_divisible(model.config, mesh)
        own = Preparation(
            layout_version=LAYOUT_VERSION,
            checkpoint=None if target is None else checkpoint_hash(files),
            dtype=str(dtype).removeprefix("torch."),
            quantization=policy if ready == folder else quantization_of(files, policy),
            scan_layers=scan_layers,
            mesh=f"{mesh.chips}x{mesh.cores} {mesh.layout}",
        )
        if prepared is not None:
            prepared.check(own)
            load_prepared(prepared, model, model._placing(mesh))
            model.requantization_error = prepared.requantization_error
        else:
            model._load(files, mesh, dtype, policy, target, own)
        model._files = files
        model.generation_config = load_generation_config(folder, config)
        model._start(mesh, runtime, dtype)
        return model

    @classmethod
    def without_weights(cls, config: PretrainedConfig, files: CheckpointFiles, scan_layers: bool = False) -> CausalLM:
        """The model of a checkpoint on the meta device; `config` is told whether the files tie the head."""
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = is_head_tied(files, config)
        with torch.device("meta"):
            return cls(config, scan_layers)

    def _load(
        self, files: CheckpointFiles, mesh: DeviceMesh, dtype: torch.dtype, quantization: str,
        target: Path | None, preparation: Preparation,
    ) -> None:  # fmt: skip
        """Fill the model from published files, and write a prepared checkpoint of it to `target`."""
        layout, place = WeightLayout(self.config), self._placing(mesh)
        filled = prepare(files, self, layout, dtype, quantization)
        if target is None:
            self.requantization_error = load_parameters(files, layout, filled, place)
        else:
            config = copy.deepcopy(self.checkpoint_config)
            config.dtype = config.get_text_config().dtype = dtype
            with new_prepared(target, files, self, filled, preparation) as preparer:
                self.requantization_error = load_parameters(files, layout, filled, place, preparer.keep)
                preparer.finish(config, self.requantization_error)
        for kind, error in self.requantization_error.items():
            logger.info(f"{kind}: requantised per output channel with a relative error of {error:.2%}")

    def _placing(self, mesh: DeviceMesh) -> Place:
        stacks = Stacks(mesh)

        def place(name: str, value: torch.Tensor, index: int | None = None) -> None:
            if index is None:
                placed = mesh.give(value, parameter_axes(name, value.dim()))
            else:
                placed = stacks.write(name, self.get_parameter(name).detach(), value, index)
            set_parameter(self, name, placed)

        return place

    def _start(self, mesh: DeviceMesh, runtime: RuntimeConfig, dtype: torch.dtype) -> None:
        for name, buffer in self.model.rotary_emb.named_buffers():
            setattr(self.model.rotary_emb, name, mesh.put(buffer, (None,)))
        for container in (self.config, self.checkpoint_config):
            container.dtype = dtype
        self._cache_layout = CacheLayout(self.config, mesh, runtime, dtype)
        self._steps = Steps(self.model, self.lm_head, Operations(mesh, runtime), runtime)
        self.eval()

    @property
    def mesh(self) -> DeviceMesh:
        return self._cache_layout.mesh

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def new_cache(self, batch: int, tokens: int = 1) -> HybridCache:
        """An empty cache for `batch` sequences with room for `tokens` tokens each; it grows when more come."""
        return HybridCache(self._cache_layout, batch, tokens)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        past_key_values: HybridCache | None = None,
        **kwargs,
    ):
        """Logits of a batch, as transformers' `forward` gives them.

        Args:
            input_ids: [batch, sequence], on any device.
            attention_mask: [batch, sequence] or [batch, seen + sequence], 0 for padding wherever it lies. Padding takes
                no part in anything; its columns repeat the logits of the last token before them (zero if there is none).
            position_ids: [batch, sequence], [3, batch, sequence] (temporal, height, width) or [4, batch, sequence] (text
                position first). By default tokens are counted, padding left out.
            cache: what an earlier call returned; it is updated in place.
            inputs_embeds: [batch, sequence, hidden size] in place of input_ids.
            labels: [batch, sequence]; the loss is the mean cross entropy of the next token, -100 and what follows no
                token left out.
            logits_to_keep: the last n columns, all for 0, or the columns that an index tensor names.
            past_key_values: another name of `cache`.

        Returns: loss, logits [batch, columns, vocabulary], cache, hidden_states (embeddings, then every layer's output,
            the last after the final norm). Tensors lie on the model's device.
        """
        steps = self.steps
        _refuse_unknown(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        cache = cache if cache is not None else past_key_values
        if input_ids is not None:
            ids, shape = check_ids(input_ids, self.vocab_size), tuple(input_ids.shape)
        else:
            ids, shape = None, check_embeddings(inputs_embeds, self.config.hidden_size)
        cache = self._continued(cache, shape)
        columns = columns_of(ids, shape, attention_mask, position_ids, cache, limit_of(self.config))
        keep = np.arange(shape[1])
        if isinstance(logits_to_keep, torch.Tensor):
            keep = keep[logits_to_keep.cpu().numpy()]
        elif logits_to_keep:
            keep = keep[-logits_to_keep:]
        columns.want_columns(np.arange(shape[1]) if output_hidden_states else keep)
        embeddings = None if inputs_embeds is None else inputs_embeds.reshape(-1, inputs_embeds.shape[-1]).cpu().to(self.dtype)
        selected = extend(steps, cache, columns.rows, embeddings, bool(output_hidden_states))
        cache.columns += shape[1]

        logits = _padded(selected, selected.logits, columns, keep)
        hidden_states = None
        if output_hidden_states:
            hidden_states = tuple(_padded(selected, rows, columns, np.arange(shape[1])) for rows in selected.hidden_states)
        loss = None
        if labels is not None:
            unpredicted = torch.from_numpy(columns.index[:, :-1] < 0)  # a first token after padding has none before it
            labels = labels.cpu().masked_fill(F.pad(unpredicted, (1, 0)), -100)
            loss = self.loss_function(logits, labels.to(logits.device), self.vocab_size)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        output = self.output_type(loss=loss, logits=logits, cache=cache if use_cache else None, hidden_states=hidden_states)
        return output if return_dict is None or return_dict else output.to_tuple()

    @property
    def steps(self) -> Steps:
        """The compiled steps of a loaded model."""
        if self._steps is None:
            raise RuntimeError(f"{type(self).__name__} has no weights; make it with from_pretrained")
        return self._steps

    def _continued(self, cache: HybridCache | None, shape: tuple[int, int]) -> HybridCache:
        if cache is None:
            return self.new_cache(shape[0], shape[1])
        if not isinstance(cache, HybridCache):
            raise ValueError(
                f"cache is a {type(cache).__name__}; pass one that this model returned, or None to start a new one"
            )
        if cache.layout is not self._cache_layout:
            raise ValueError("the cache was made by another model; pass one that this model returned")
        if cache.batch != shape[0]:
            raise ValueError(f"the cache holds {cache.batch} sequences and the batch has {shape[0]}")
        return cache

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = "5GB",
        push_to_hub: bool = False,
        format: str | None = None,
        **kwargs,
    ) -> None:
        """Write config.json, generation_config.json and the weights under their published names.

        Tensors that the checkpoint held beside the text model (multi-token prediction; vision too, unless only the text
        configuration is saved) are copied from it. An older checkpoint in the folder is replaced once the new one is whole;
        a crash leaves the old one, or none that loads. transformers loads the folder with the same logits.

        Args:
            format: "bf16"; "fp8" for the published FP8 format, blocks of 128×128 with a scale each; None for what the model
                holds. `A_log` and `linear_attn.norm` are FP32 in all of them.

        Raises:
            ValueError: weights that were requantised as they were loaded.
            OSError: naming the tensor and the file that could not be written.
        """
        self.steps  # noqa: B018, a model without weights is refused here
        _refuse_unknown({**kwargs, "push_to_hub": push_to_hub} if push_to_hub else kwargs)
        if format is not None and format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)} or None, not {format!r}")
        folder = Path(save_directory)
        if folder.is_file():
            raise ValueError(f"{folder} is a file; pass a folder")
        whole = self.checkpoint_config is not self.config and self.checkpoint_config.model_type != self.config.model_type
        publisher = Publisher(self, WeightLayout(self.config), self.mesh, self._files, whole, format)
        if publisher.is_requantized:
            raise ValueError(
                "the weights were requantised per output channel as they were loaded, and would be saved with that loss; "
                "load the model with RuntimeConfig(quantization='keep') to save it"
            )
        tensors = publisher.tensors()
        config = _saved_config(self.checkpoint_config, tensors)
        with replaced_checkpoint(folder) as partial:
            write_weights(partial, tensors, max_shard_size)
            config.save_pretrained(partial)
            self.generation_config.save_pretrained(partial)


class Qwen3_5MoeForCausalLM(CausalLM):
    """Qwen 3.5 mixture of experts, 35B-A3B to 397B-A17B."""

    config_class = Qwen3_5MoeTextConfig
    output_type = MoeCausalLMOutputWithPast


class Qwen3_5ForCausalLM(CausalLM):
    """Dense Qwen 3.5, 0.8B to 27B."""

    config_class = Qwen3_5TextConfig


def _saved_config(config: PretrainedConfig, tensors: dict[str, Saved]) -> PretrainedConfig:
    """The configuration of a checkpoint that holds `tensors`: it says whether they are FP8, and how."""
    config = copy.deepcopy(config)
    is_fp8 = any(name.endswith(SCALE) for name in tensors)
    if not is_fp8 and hasattr(config, "quantization_config"):
        del config.quantization_config
    elif is_fp8 and not getattr(config, "quantization_config", None):
        config.quantization_config = quantization_settings(tensors)
    return config


def _publish(model: CausalLM, state: dict, prefix: str, metadata: dict) -> None:
    """Hook: `state_dict()` speaks the published form."""
    layout = WeightLayout(model.config)
    for name, _ in model.named_parameters():
        published = layout.to_published(name, state.pop(prefix + name))
        state.update({prefix + part: tensor for part, tensor in published.items()})


def _unpublish(model: CausalLM, state: dict, prefix: str, metadata, strict: bool, missing, unexpected, errors: list) -> None:
    """Hook: `load_state_dict()` takes the published form. Parameters of which a part does not fit keep their values."""
    layout = WeightLayout(model.config)
    for name, value in model.named_parameters():
        parts = {}
        for part, wanted in layout.to_published(name, value.to("meta")).items():
            given = state.pop(prefix + part, None)
            if given is None:
                missing.append(prefix + part)
            elif given.shape != wanted.shape:
                errors.append(f"{prefix + part} has shape {list(given.shape)}, the model {list(wanted.shape)}")
            else:
                parts[part] = given
        complete = len(parts) == len(layout.parts(name))
        state[prefix + name] = layout.to_device(name, parts) if complete else value


def _padded(selected: Selected, rows: torch.Tensor, columns, keep: np.ndarray) -> torch.Tensor:
    """Results of tokens, [total, size], laid out as [batch, kept columns, size]."""
    place = np.full((len(columns.rows), len(keep)), -1, np.int64)
    for number, row in enumerate(columns.rows):
        index = columns.index[number][keep]
        known = index >= 0
        place[number, known] = selected.place[number][np.searchsorted(row.wanted, index[known])]
    index = torch.from_numpy(np.maximum(place, 0)).to(rows.device)
    result = rows.index_select(0, index.view(-1)).view(*place.shape, rows.shape[-1])
    if (place < 0).any():
        result = result * torch.from_numpy(place >= 0).to(rows.device).unsqueeze(-1)
    torch_xla.sync()
    return result


def _refuse_unknown(arguments: dict) -> None:
    """Refuse arguments that would change something and are not supported."""
    for name, value in arguments.items():
        if name in _IGNORED_ARGUMENTS or value is None or value is False:
            continue
        if name == "device_map":
            raise ValueError("device_map is not supported; the layout over devices is parallel=ParallelConfig(...)")
        raise ValueError(f"{name}={value!r} is not supported")


def _resolve_dtype(dtype: torch.dtype | str | None, config: PretrainedConfig) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    resolved = getattr(torch, name, None) if isinstance(name, str) else name
    if resolved not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {dtype} is not supported; use float32, bfloat16 or float16")
    return resolved


def check_divisible(config, mesh: DeviceMesh) -> None:
    counts = {
        "heads": ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"),
        "experts": ("num_experts",),
    }
    for axis, names in counts.items():
        for name in names:
            count, shards = getattr(config, name, 0), mesh.shards(axis)
            if count % shards:
                remedy = "a layout that splits it less (dp, dp_tp) or another mesh"
                if axis == "experts":  # spread over all devices in every layout
                    remedy = "a mesh whose number of devices divides it"
                raise ValueError(
                    f"layout '{mesh.layout}' splits {name} = {count} over {shards} devices, which does not divide; use {remedy}"
                )
