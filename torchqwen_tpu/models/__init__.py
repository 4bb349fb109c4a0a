"""The decoder of Qwen 3.5, mixture of experts and dense, on flat ragged batches."""
