"""How the variance of the OPD gradient grows with the response length, per token and per sequence.

    python docs/evidence/programs/variance_growth.py --output variance_growth.html

The toy: the student is a bigram table over a few tokens; the teacher is another, and differs
between prompts, which the student cannot see. Per-sequence gradients by the student's table are
summed over the response; the figure shows the trace of their covariance over T, and its slope in
log-log. Noise of single tokens adds up like T, what all tokens of a response share (here the
prompt) like T^2, so discount 0 lies between; returns grow with what is left of the response, so
discount 1 goes like T^3. With `--prompt-spread 0` nothing is shared and discount 0 has slope 1.
Not a statement about any language model.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stable_opd_mcore.losses.token_weights import return_to_go

LENGTHS = (8, 16, 32, 64, 128, 256)
PROMPTS = 8
DISCOUNTS = (0.0, 0.9, 1.0)
COLOURS = ("#0072B2", "#009E73", "#D55E00")


@dataclass(frozen=True)
class Toy:
    """Log-probabilities of the next token (last dimension) after each token, float64."""

    student_VV: Tensor
    teacher_PVV: Tensor  # one table per prompt


def make_toy(vocab: int, prompts: int, prompt_spread: float, seed: int) -> Toy:
    """Random tables; prompt_spread is the deviation of the prompts' logits from their mean."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, vocab, vocab, generator=generator, dtype=torch.float64)
    apart = torch.randn(prompts, vocab, vocab, generator=generator, dtype=torch.float64)
    return Toy(student.log_softmax(1), (teacher + prompt_spread * apart).log_softmax(2))


def sample_tokens(toy: Toy, sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Token ids [S, length + 1] from the student, uniform first."""
    tokens = [torch.randint(len(toy.student_VV), (sequences,), generator=generator)]
    for _ in range(length):
        probabilities = toy.student_VV[tokens[-1]].exp()
        tokens.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
    return torch.stack(tokens, dim=1)


def gradient_variance(toy: Toy, length: int, discount: float, sequences: int, seed: int) -> float:
    """Trace of the covariance of sum_t G_t d log pi(y_t) / d logits over sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens_ST = sample_tokens(toy, sequences, length, generator)
    prompt = torch.randint(len(toy.teacher_PVV), (sequences,), generator=generator)
    states, targets = tokens_ST[:, :-1].flatten(), tokens_ST[:, 1:].flatten()
    sample = torch.arange(sequences).repeat_interleave(length)
    teacher = toy.teacher_PVV[prompt[sample], states, targets]
    advantage = teacher - toy.student_VV[states, targets]
    returns = return_to_go(advantage, sample, torch.arange(length).repeat(sequences), discount)
    vocab = len(toy.student_VV)
    by_logits = -toy.student_VV.exp()[states]
    by_logits[torch.arange(len(targets)), targets] += 1
    gradient = torch.zeros(sequences * vocab, vocab, dtype=torch.float64)
    gradient.index_add_(0, sample * vocab + states, returns[:, None] * by_logits)
    return float(gradient.view(sequences, -1).var(dim=0).sum())


def slope(variances: list[float]) -> float:
    """Least squares of log variance on log length."""
    x = torch.tensor(LENGTHS, dtype=torch.float64).log()
    y = torch.tensor(variances, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def measure(
    vocab: int, prompt_spread: float, sequences: int, seed: int
) -> dict[float, list[float]]:
    """Variance at every length, by discount."""
    toy = make_toy(vocab, PROMPTS, prompt_spread, seed)
    return {
        discount: [
            gradient_variance(toy, length, discount, sequences, seed + length) for length in LENGTHS
        ]
        for discount in DISCOUNTS
    }


def plot_figure(measured: dict[float, list[float]]) -> go.Figure:
    figure = go.Figure(
        layout=go.Layout(
            title="Gradient variance against response length",
            xaxis=go.layout.XAxis(title="response length T [tokens]", type="log"),
            yaxis=go.layout.YAxis(title="trace of the gradient's covariance", type="log"),
            template="plotly_white",
        )
    )
    for colour, (discount, variances) in zip(COLOURS, measured.items(), strict=True):
        figure.add_scatter(
            x=LENGTHS,
            y=variances,
            mode="lines+markers",
            line={"color": colour},
            name=f"discount {discount:g}: slope {slope(variances):.2f}",
        )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("variance_growth.html"))
    parser.add_argument("--vocab", type=int, default=3)
    parser.add_argument("--prompt-spread", type=float, default=1.0)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    measured = measure(options.vocab, options.prompt_spread, options.sequences, options.seed)
    table = Table(title="trace of the covariance of the gradient")
    for heading in ("discount", *(f"T={length}" for length in LENGTHS), "slope"):
        table.add_column(heading, justify="right")
    for discount, variances in measured.items():
        figures = [f"{value:.3g}" for value in variances]
        table.add_row(f"{discount:g}", *figures, f"{slope(variances):.2f}")
    Console().print(table)
    plot_figure(measured).write_html(options.output, include_plotlyjs=True)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
