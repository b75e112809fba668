"""The results of evaluations as a text table and as plain values for evaluation.json."""

from __future__ import annotations

from collections.abc import Mapping

from stable_opd_mcore.evaluation.evaluate import EvaluationResult


def results_table(results: Mapping[str, EvaluationResult]) -> str:
    """One line per evaluation; for several, their unweighted mean accuracy."""
    width = max(len("average"), *map(len, results))
    head = "problems    k  accuracy  95 % interval    truncated  repetitive  tokens"
    lines = [f"{'':{width}}  {head}"]
    for name, result in results.items():
        low, high = result.accuracy_interval
        lines.append(
            f"{name:{width}}  {len(result.prompts):8}  {result.samples_per_prompt:3}"
            f"  {result.accuracy:8.3f}  {low:.3f} to {high:.3f}  {result.truncation_rate:11.3f}"
            f"  {result.repetition_rate:10.3f}  {result.response_length_mean:6.0f}"
        )
    if len(results) > 1:
        mean = sum(result.accuracy for result in results.values()) / len(results)
        lines.append(f"{'average':{width}}  {'':8}  {'':3}  {mean:8.3f}")
    return "\n".join(lines)


def plain_values(result: EvaluationResult) -> dict[str, float]:
    """The numbers of one evaluation: rates as shares of all responses, lengths in tokens."""
    low, high = result.accuracy_interval
    return {
        "accuracy": result.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "num_prompts": len(result.prompts),
        "num_samples": result.samples_per_prompt,
        "truncation_rate": result.truncation_rate,
        "repetition_rate": result.repetition_rate,
        "response_length_mean": result.response_length_mean,
    }
