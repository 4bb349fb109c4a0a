"""Gated DeltaNet: causal convolution, SiLU and the gated delta rule over a flat ragged batch of tokens.

Every implementation is a function with this signature (T tokens, S sequences, N slots of one device):

    gated_delta_net(qkv, beta, decay, conv_weight, query_start, query_length, context_length, slot,
                    conv_state, recurrent_state, *, shape, decode=False) -> output, conv_state, recurrent_state

    qkv              [T, channels]   projected tokens, channels in the order of `GatedDeltaNetShape`
    beta             [T, value heads] float32, how much of the old value a token replaces, 0 to 1
    decay            [T, value heads] float32, log of the factor on the state before a token, at most 0
    conv_weight      [width, channels]
    query_start      [S] int32, first row of each sequence in the flat batch
    query_length     [S] int32, rows of each sequence in this batch; 0 leaves its state as it is
    context_length   [S] int32, tokens the sequence has seen before; 0 starts from zero, whatever the slot holds
    slot             [S] int32, where the sequence's states live, distinct for all sequences with rows
    conv_state       [N, width - 1, channels] the last inputs of the convolution
    recurrent_state  [N, value heads, key dim, value dim]
    shape            `GatedDeltaNetShape` of this device's heads
    decode           a promise: T = S = N, row i and slot i belong to sequence i, and no sequence has more than one row

    output           [T, value heads, value dim] in the dtype of qkv; rows of no sequence are zero

Arithmetic is FP32 whatever the dtype of the inputs and the states.
"""

from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape

__all__ = ["GatedDeltaNetShape"]
