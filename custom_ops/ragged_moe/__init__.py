"""Mixture of experts over a flat batch of tokens, experts split over devices, no token padded or dropped.

Every implementation is a function with this signature (T tokens and E / devices experts of one device):

    ragged_moe(hidden, router_logits, valid, gate_up, down, *, top_k, token_axes, expert_axes, round_weights=False,
               layer=None) -> output

    hidden           [T, hidden size]
    router_logits    [T, E] float32
    valid            [T] bool; rows that are no token reach no expert and get zero
    gate_up          [local experts, 2 * width, hidden size], gate rows first
    down             [local experts, hidden size, width]
    top_k            experts a token
    token_axes       mesh axes that split the tokens
    expert_axes      mesh axes that split the experts; a device holds a contiguous run of them
    round_weights    round the routing weights to the dtype of hidden, as transformers does
    layer            [] int32 or None: the weights are stacks [layers, ...], and this is the one to use. An implementation
                     reads it in place: a slice of a stack would be a copy of all of a layer's experts

    output           [T, hidden size] in the dtype of hidden

Routing is a float32 softmax over all experts, the top_k largest, divided by their sum.

Routing and communication are in `layer.py`; implementations differ in the local experts alone, functions with this
signature (R rows of all devices):

    experts(rows, expert, weight, gate_up, down, *, num_experts, layer=None) -> partial

    rows             [R, hidden size]
    expert           [R, top_k] int32, local number of each of a row's experts; the count of local experts or more where
                     the expert is another device's, or the row is no token
    weight           [R, top_k] float32
    num_experts      of all devices
    partial          [R, hidden size] float32, the weighted sum over the row's local experts
"""
