"""On-policy distillation in one loop. `python docs/examples/tutorial.py` takes a minute on a CPU.

The student samples solutions to generated arithmetic. The teacher scores every token of them. The
student learns from the scores. The models, the engine that samples and the packing are the
trainer's own; the loss is written out here, on logits [N, V]. losses/fused.py computes the same
without them, and train/step.py is this loop for a cluster. Not here: more than one rank,
checkpoints, the guard.

N sampled tokens of a micro-batch, V ids of the vocabulary, B samples.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from stable_opd_mcore.config.data import DataConfig
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.samples import golden_samples, rollout_samples
from stable_opd_mcore.data.synthetic import ARITHMETIC, VOCABULARY, arithmetic_rows
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import MicroBatch, Prompt, Rollout, Sample, Sampling
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from stable_opd_mcore.sample_facts import SampleWeights

WINDOW, MAX_NEW_TOKENS = 128, 32
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "vocab_size": len(VOCABULARY),
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
TASK = {"rows": 1024, "min_operations": 1, "max_operations": 2}
BETA, LAMBDA = 0.1, 0.1  # Stable-OPD's two weights; both 0: plain on-policy distillation


def main(pretraining: int = 400, steps: int = 60, prompts_per_step: int = 32) -> list[float]:
    """Train the student; return the share of right answers among the rollouts of each step."""
    world = start_world(ParallelConfig(), seed=0)
    tokenizer = Tokenizer.load("synthetic")
    prompts = encode(tokenizer)

    # A teacher that has learnt the task, and a student that has begun to.
    teacher, student = new_model(world, seed=1), new_model(world, seed=2)
    supervise(teacher, prompts, pretraining)
    supervise(student, prompts, pretraining // 3)
    reference = new_model(world, seed=2)
    reference.load_state_dict(student.state_dict())  # frozen: what the student was at the start

    engine = EmbeddedEngine([student], world, tokenizer.decode, vocab_size=tokenizer.vocab_size)
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=tokenizer.stop_token_ids)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    accuracies: list[float] = []
    for step in range(steps):
        first = step * prompts_per_step % len(prompts)
        chosen = prompts[first : first + prompts_per_step]

        # 1. The student samples a response to each prompt.
        rollouts = engine.generate(chosen, sampling, step=step)

        # 2. Rollouts and golden solutions are packed into sequences without padding. A token's
        #    weight holds the normaliser, so each term of the loss is a sum.
        sampled, golden = packed(rollout_samples(rollouts)), packed(golden_samples(chosen))

        # 3. Teacher and reference score every sampled token.
        with torch.no_grad():
            teacher_NV, reference_NV = (
                log_softmax(teacher, sampled),
                log_softmax(reference, sampled),
            )

        # 4. The student is updated, and samples the next rollouts with its new weights.
        loss = on_policy(log_softmax(student, sampled), teacher_NV, reference_NV, sampled)
        loss = loss + LAMBDA * supervised(log_softmax(student, golden), golden)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        engine.publish(step + 1)

        accuracies.append(float(np.mean([is_right(rollout) for rollout in rollouts])))
        print(f"step {step + 1:2}  loss {loss.item():7.4f}  accuracy {accuracies[-1]:.2f}")
    stop_world()
    return accuracies


def on_policy(
    student_NV: Tensor, teacher_NV: Tensor, reference_NV: Tensor, batch: MicroBatch
) -> Tensor:
    """docs/method.md §1: each sampled token times its advantage by the teacher, and β times the
    exact KL to the reference."""
    student_N, teacher_N = of_targets(student_NV, batch), of_targets(teacher_NV, batch)
    advantage_N = (teacher_N - student_N).detach()  # positive: the teacher finds it more probable
    kl_N = (student_NV.exp() * (student_NV - reference_NV)).sum(1)
    return (batch.pg_weight_N * (-advantage_N * student_N + BETA * kl_N)).sum()


def supervised(student_NV: Tensor, batch: MicroBatch) -> Tensor:
    """The negative log-likelihood of golden solutions."""
    return -(batch.sft_weight_N * of_targets(student_NV, batch)).sum()


def of_targets(logprobs_NV: Tensor, batch: MicroBatch) -> Tensor:
    return logprobs_NV.gather(1, batch.targets_N[:, None])[:, 0]


def log_softmax(model: Module, batch: MicroBatch) -> Tensor:
    """[N, V]: the model's log-probabilities where a sampled token is predicted."""
    head = output_head([model])
    assert head is not None
    hidden_NH = forward_hidden(model, batch).index_select(0, batch.rows_N)
    return (hidden_NH @ head.weight_VH.T)[:, : len(VOCABULARY)].float().log_softmax(1)


def packed(samples: Sequence[Sample]) -> MicroBatch:
    """Samples of one kind as one micro-batch, whose terms are means over its sampled tokens."""
    golden_B = np.array([sample.kind == "golden" for sample in samples])
    mean = 1 / sum(len(sample.places) for sample in samples)
    weights = SampleWeights(pg_B=~golden_B * mean, kl_B=~golden_B * mean, sft_B=golden_B * mean)
    [batch] = pack(samples, weights, max_tokens=1_000_000)
    return batch


def supervise(model: Module, prompts: Sequence[Prompt], steps: int) -> None:
    """Train on golden solutions only."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        first = step * 64 % len(prompts)
        batch = packed(golden_samples(prompts[first : first + 64]))
        optimizer.zero_grad()
        supervised(log_softmax(model, batch), batch).backward()
        optimizer.step()


def new_model(world: World, seed: int) -> Module:
    [model] = build_model(read_architecture(MODEL), world, trainable=True, seed=seed)
    return model


def encode(tokenizer: Tokenizer) -> list[Prompt]:
    """Generated problems with their solutions, as the models read them."""
    rows = arithmetic_rows(TASK, "train")
    settings = DataConfig.model_validate({"train": {"path": ARITHMETIC}})
    prompts = PromptSet(
        rows, tokenizer, settings, window=WINDOW, max_new_tokens=MAX_NEW_TOKENS, golden="required"
    )
    return prompts.select(range(len(prompts)))


def is_right(rollout: Rollout) -> bool:
    return rollout.text.endswith(f"[{rollout.prompt.answer}]")


if __name__ == "__main__":
    main()
