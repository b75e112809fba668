"""A teacher with its own prompt scores as a plain forward over teacher prompt and response does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import load_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import Sample
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.scoring.own_prompt import OwnPromptScorer
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.train.samples.sharing import pack_micro_batches
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.shares import sample_of, weights_of, with_gaps
from tests.train.runs import tiny_config

TOP_K = 3
LAYOUTS = {
    "packed": {},
    "tp2_sp_cp2": {"tensor": 2, "context": 2, "sequence": True},
    "pp2_cp2": {"pipeline": 2, "context": 2},
}
LENGTHS = [(3, 17, 5), (9, 2, 12), (4, 30, 1), (2, 2, 8), (6, 11, 7)]  # prompt, teacher's, response


def samples_of() -> list[Sample]:
    """Five samples, the last two with gaps; only the second of the golden solutions is scored."""
    random = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return random.integers(0, tiny.VOCAB_SIZE, length)

    samples = [
        sample_of(
            kind="golden" if number in (1, 3) else "rollout",
            off_policy=number == 3,
            prompt_id=f"s:{number}",
            prompt_token_ids=ids(prompt),
            response_token_ids=ids(response),
            trained=np.ones(response, np.bool_),
            teacher_prompt_token_ids=ids(own),
        )
        for number, (prompt, own, response) in enumerate(LENGTHS)
    ]
    return [*samples[:3], *map(with_gaps, samples[3:])]


def config_of(directory: Path, parallel: dict) -> Config:
    """Micro-batches of 48 tokens: student and teacher need different numbers of them."""
    return tiny_config(directory, "own", parallel=parallel, train={"micro_batch_tokens": 48})


def own_prompt(scorer: Scorer, config: Config, world: World) -> OwnPromptScorer:
    def pack(samples):
        return batches_of(samples, config, world)

    return OwnPromptScorer(scorer, world, pack)


def batches_of(samples, config: Config, world: World):
    return pack_micro_batches(config, world, samples, weights_of(samples), attention_length=99.0)


def score_on_layouts(rank: int, world_size: int, model: str, out: str, layouts: list[str]) -> None:
    for name in layouts:
        config = config_of(Path(out), LAYOUTS[name])
        world = start_world(config.parallel, seed=0)
        chunks = build_model(read_architecture(model), world, trainable=False)
        load_hf(chunks, model)
        samples = samples_of()
        batches = [batch for batch in batches_of(samples, config, world) if batch.is_scored]
        found = {}
        asked = [replace(b, targets_N=(b.targets_N + 1) % tiny.VOCAB_SIZE) for b in batches]
        for options in ({"top_k": TOP_K}, {"hidden_only": True}):
            scorer = MegatronScorer(chunks, world, vocab_size=tiny.VOCAB_SIZE, **options)
            scores = own_prompt(scorer, config, world).score(asked, samples)
            assert len(scores) == (len(batches) if world.is_last_stage else 0)
            for batch, of_batch in zip(batches, scores, strict=world.is_last_stage):
                for row, place in enumerate(zip(*places(batch), strict=True)):
                    values = {k: v[row] for k, v in vars(of_batch).items() if v is not None}
                    found.setdefault(place, {}).update(values)
        torch.save(found, f"{out}/{name}_{rank}.pt")
        stop_world()


def places(batch) -> tuple[list[int], list[int]]:
    return batch.sample_index_N.tolist(), batch.token_index_N.tolist()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, Path]:
    """The model's directory, and that of the scores."""
    model, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("scores")
    torch.manual_seed(3)
    fields = tiny.config("qwen2")
    fields.pop("head_dim")
    Qwen2ForCausalLM(Qwen2Config(**fields)).save_pretrained(model)
    run_ranks(1, score_on_layouts, str(model), str(out), ["packed"])
    run_ranks(4, score_on_layouts, str(model), str(out), ["tp2_sp_cp2", "pp2_cp2"])
    return model, out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_teacher_prompt_and_response(results, layout):
    path, out = results
    model = Qwen2ForCausalLM.from_pretrained(path).eval()
    found = {}
    for part in sorted(out.glob(f"{layout}_*.pt")):
        found |= torch.load(part)
    samples = samples_of()
    scored = [number for number, sample in enumerate(samples) if sample.is_scored]
    assert scored == [0, 2, 3, 4]
    assert len(found) == sum(len(samples[number].places) for number in scored)
    for number in scored:
        sample = samples[number]
        prompt, start = sample.teacher_prompt_token_ids, sample.num_prompt_tokens
        ids = torch.tensor(np.concatenate([prompt, sample.token_ids[start:]])).long()[None]
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
        rows = torch.tensor(sample.places - start + len(prompt) - 1)
        log_p_NV = output.logits[0, rows].log_softmax(1)
        top = log_p_NV.topk(TOP_K, dim=1)
        targets = (
            sample.token_ids[sample.places] + 1
        ) % tiny.VOCAB_SIZE  # see `asked` above: any may be asked for
        for token, target in enumerate(targets.tolist()):
            values = found[number, token]
            near = {"atol": 1e-5, "rtol": 0}
            torch.testing.assert_close(values["logprob_N"], log_p_NV[token, target], **near)
            torch.testing.assert_close(values["topk_logprobs_NK"], top.values[token], **near)
            assert torch.equal(values["topk_ids_NK"], top.indices[token])
            hidden = output.hidden_states[-1][0, rows][token]
            torch.testing.assert_close(values["hidden_NH"], hidden, **near)
