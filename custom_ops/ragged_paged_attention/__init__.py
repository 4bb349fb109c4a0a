"""Causal attention of a flat ragged batch over paged keys and values.

Every implementation is a function with this signature (T tokens, S sequences of one device):

    ragged_paged_attention(query, key, value, pages, query_start, query_length, context_length, page_table,
                           page_scale=None, *, scale, decode=False) -> output, pages(, page_scale)

    query            [T, query heads, head dim], rotated
    key, value       [T, KV heads, head dim], keys rotated; query heads are grouped by KV head
    pages            [pages, 2 * KV heads, page size, head dim]: keys and values of a head follow each other, and the tokens
                     of a page are the rows of a matrix
    query_start      [S] int32, first row of each sequence in the flat batch
    query_length     [S] int32, rows of each sequence in this batch
    context_length   [S] int32, tokens of the sequence already in its pages
    page_table       [S, pages a sequence] int32; position p lies in page_table[s, p // page size]
    page_scale       [pages, 2 * KV heads, page size] float32, what each row of FP8 pages is multiplied with: `pages` then are
                     float8_e4m3fn. None for pages in another dtype, which hold keys and values as they are
    scale            factor on the scores
    decode           a promise: T = S, row i belongs to sequence i, and no sequence has more than one row

    output           [T, query heads, head dim] in the dtype of query; rows of no sequence are zero
    pages            with the new keys and values written, and page_scale with theirs if there is one

Scores and softmax are FP32. A token of the batch sees its own and its neighbours' keys and values as the pages hold them,
rounded.
"""
