"""Causal attention of a flat ragged batch over paged keys and values.

Every implementation is a function with this signature (T tokens, S sequences of one device):

    ragged_paged_attention(query, key, value, pages, query_start, query_length, context_length, page_table,
                           *, scale, decode=False) -> output, pages

    query            [T, query heads, head dim], rotated
    key, value       [T, KV heads, head dim], keys rotated; query heads are grouped by KV head
    pages            [pages, page size, 2 * KV heads, head dim]: key and value of a head side by side
    query_start      [S] int32, first row of each sequence in the flat batch
    query_length     [S] int32, rows of each sequence in this batch
    context_length   [S] int32, tokens of the sequence already in its pages
    page_table       [S, pages a sequence] int32; position p lies in page_table[s, p // page size]
    scale            factor on the scores
    decode           a promise: T = S, row i belongs to sequence i, and no sequence has more than one row

    output           [T, query heads, head dim] in the dtype of query; rows of no sequence are zero
    pages            with the new keys and values written

Scores and softmax are FP32.
"""
