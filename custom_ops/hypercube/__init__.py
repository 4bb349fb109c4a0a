"""What the hierarchical collectives share: the chips as corners of a hypercube, two cores on each.

`layout` says which columns cross which dimension and in which order, `links` how long that takes, `partners` whom a kernel
meets. The collectives themselves are `custom_ops.reduce_scatter` and, the same steps backwards, `custom_ops.all_gather`.
"""
