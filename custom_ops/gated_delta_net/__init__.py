"""Gated DeltaNet: causal convolution, SiLU and the gated delta rule over a flat ragged batch of tokens.

Every implementation is a function with this signature (T tokens, S sequences, N slots of one device):

    gated_delta_net(qkv, b, a, conv_weight, A_log, dt_bias, query_start, query_length, context_length, slot,
                    conv_state, recurrent_state, checkpoint_slot=None, *, shape, decode=False)
        -> output, conv_state, recurrent_state

    qkv              [T, channels]   projected tokens, channels in the order of `GatedDeltaNetShape`
    b, a             [T, value heads] float32, what the gates are made of: beta = sigmoid(b) is how much of the old value
                     a token replaces, g = -exp(A_log) * softplus(a + dt_bias) the log of the factor on the state before it
    conv_weight      [width, channels]
    A_log, dt_bias   [value heads] float32
    query_start      [S] int32, first row of each sequence in the flat batch
    query_length     [S] int32, rows of each sequence in this batch; 0 leaves its state as it is
    context_length   [S] int32, tokens the sequence has seen before; 0 starts from zero, whatever the slot holds
    slot             [S] int32, where the sequence's states live, distinct for all sequences with rows
    conv_state       [N, width - 1 or more, channels] the last inputs of the convolution, in the first width - 1 rows; what the
                     others hold means nothing (a TPU stores pools of four rows as they are and copies pools of three)
    recurrent_state  [N, value heads, key dim, value dim]
    checkpoint_slot  [S, K] int32 or None: both states as they are after token j of a sequence also go to slot
                     checkpoint_slot[s, j], so that decoding can go on from there if later tokens are rejected; -1 keeps
                     none. These slots are distinct from each other and from those of sequences with rows, and a sequence
                     that has any takes at most K rows.
    shape            `GatedDeltaNetShape` of this device's heads
    decode           a promise: T = S, row i belongs to sequence i, no sequence has more than one row, and the slots are a
                     run: slot[0], slot[0] + 1 and so on; there are no checkpoints then

    output           [T, value heads, value dim] in the dtype of qkv; rows of no sequence are zero

Arithmetic is FP32 whatever the dtype of the inputs and the states.
"""

from custom_ops.gated_delta_net.shapes import GatedDeltaNetShape

__all__ = ["GatedDeltaNetShape"]
