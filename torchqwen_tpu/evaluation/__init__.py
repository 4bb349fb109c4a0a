"""Scores of given texts, token by token, and the model as evaluation harnesses know it."""

from torchqwen_tpu.evaluation.scoring import TokenScores, score, score_requests

__all__ = ["TokenScores", "score", "score_requests"]
