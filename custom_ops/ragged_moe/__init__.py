"""Mixture of experts over a flat batch of tokens, experts split over devices, no token padded or dropped.

Every implementation is a function with this signature (T tokens and E / devices experts of one device):

    ragged_moe(hidden, router_logits, valid, gate_up, down, gate_up_scale=None, down_scale=None, *, top_k, token_axes,
               expert_axes, round_weights=False, wire=None, sum_dtype="float32", micro_batches=1, all_gather=...,
               reduce_scatter=..., layer=None)
        -> output

    hidden           [T, hidden size]
    router_logits    [T, E] float32
    valid            [T] bool; rows that are no token reach no expert and get zero
    gate_up          [local experts, 2 * width, hidden size], gate rows first
    down             [local experts, hidden size, width]
    gate_up_scale    float32, for FP8 weights: of each output channel [local experts, 2 * width], or of each block of 128×128
                     [local experts, ⌈2 * width / 128⌉, ⌈hidden size / 128⌉]; a weight is multiplied by it
    down_scale       the same of down, with `hidden size` output channels
    top_k            experts a token
    token_axes       mesh axes that split the tokens
    expert_axes      mesh axes that split the experts; a device holds a contiguous run of them
    round_weights    round the routing weights to the dtype of hidden, as transformers does
    wire             dtype in which rows go to the experts, whether they leave the device or not; None for that of hidden. FP8
                     rows have a scale each, int8 rows one for each block of 128 columns
    sum_dtype        dtype in which the devices' partial sums travel
    micro_batches    parts of the tokens that follow each other, so that one part's all-gather is under way during another's
                     experts; None for what `cost` chooses for a TPU
    all_gather       one of `custom_ops.all_gather`, for the first micro-batch; XLA's by default. The others' is always XLA's,
                     which runs beside the experts
    reduce_scatter   one of `custom_ops.reduce_scatter`; XLA's by default
    layer            [] int32 or None: the weights are stacks [layers, ...], and this is the one to use. An implementation
                     reads it in place: a slice of a stack would be a copy of all of a layer's experts

    output           [T, hidden size] in the dtype of hidden

Routing is a float32 softmax over all experts, the top_k largest, divided by their sum; of equal ones the first. A token whose
logits or row hold a value that is not finite gets NaN throughout, and no other token does: it is never routed as if nothing
had happened.

Communication is in `layer.py`; implementations differ in the local experts, functions with this signature (R rows of all
devices). On TPU the kernels around the all-gather also route and pack the tokens, and open them (`layer.with_packed_experts`).

    experts(rows, expert, weight, gate_up, down, gate_up_scale=None, down_scale=None, *, num_experts, row_scale=None,
            layer=None)
        -> partial

    rows             [R, hidden size], in the dtype of hidden or in FP8; int8 rows were multiplied by their scales before
    row_scale        [R] float32, what FP8 rows are multiplied by; a row's may be NaN, and its result then is
    expert           [R, top_k] int32, local number of each of a row's experts; the count of local experts or more where
                     the expert is another device's, or the row is no token
    weight           [R, top_k] float32
    num_experts      of all devices
    partial          [R, hidden size], the weighted sum over the row's local experts; summed in float32, and returned in it or
                     (where rows are not float32) rounded to bfloat16, in which a TPU sends it on
"""
