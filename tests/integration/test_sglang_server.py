"""One real server: its start, replies and end, for a student and as a teacher."""

import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from stable_opd_mcore.config.schema import TeacherConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import export_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Sample, Sampling
from stable_opd_mcore.rollout.sglang.checksums import Difference
from stable_opd_mcore.rollout.sglang.server_setup import model_config
from stable_opd_mcore.rollout.sglang.server_values import Suspect, compare_values
from stable_opd_mcore.rollout.sglang.transports import Target
from stable_opd_mcore.sample_facts import SampleWeights
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.scoring.served import ServedScorer
from stable_opd_mcore.serving.client import RefusedRequest, SglangClient
from stable_opd_mcore.serving.command import VALUES_WRITER
from stable_opd_mcore.serving.process import ServerOptions, SglangServer
from stable_opd_mcore.serving.requests import Completion, Generation
from stable_opd_mcore.serving.teacher import ServedTeacher, Wanted
from stable_opd_mcore.train.samples.served_scores import begin_scoring
from tests.integration.sglang_tools import (
    PYTHON,
    SERVER_ARGUMENTS,
    VOCABULARY,
    architecture,
    external,
    faulty_proxy,
    group_lives,
    needs_sglang,
    rollouts,
    rows,
    serve,
    started,
    train,
    urls_of,
    wait_until,
)
from tests.shares import sample_of, weights_of
from tests.train.test_same_teacher import compare

pytestmark = [needs_sglang, pytest.mark.cluster]
FIELDS = architecture("qwen3", tied=False, head_dim=16)


@pytest.fixture(scope="module")
def chunks(world):
    return build_model(read_architecture(FIELDS), world, precision="fp32", trainable=False, seed=5)


@pytest.fixture(scope="module")
def server(world, chunks, tmp_path_factory) -> Iterator[SglangServer]:
    """A server with real weights from a directory, and a key although it is on loopback."""
    directory = tmp_path_factory.mktemp("server")
    export_hf(chunks, directory / "model")
    config = model_config(read_architecture(FIELDS))
    (directory / "model/config.json").write_text(json.dumps(config))
    options = ServerOptions(
        python=PYTHON,
        model=str(directory / "model"),
        dummy_weights=False,
        api_key="secret",
        arguments=(
            *(*SERVER_ARGUMENTS, "--preferred-sampling-params", '{"top_k": 1}'),
            *("--custom-weight-loader", VALUES_WRITER),  # as a server of the student's has it
        ),
    )
    server = SglangServer(options, directory / "server.log")
    with started(server):
        yield server
        pid = server.pid
        assert pid is not None
    wait_until(lambda: not group_lives(pid), "its workers end with it")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("key") / "key"
    file.touch(0o600)
    file.write_text("secret\n")
    return str(file)


def generation(first: int = 3, vocab_size: int = VOCABULARY, **sampling) -> Generation:
    changed = {"max_new_tokens": 8, "stop_token_ids": (2,)} | sampling
    ids = tuple(range(first, first + 12))
    return Generation(ids, Sampling(**changed), vocab_size, padded_vocab_size=VOCABULARY)


def several(client: SglangClient, request: Generation, number: int) -> list[Completion]:
    return [reply.result() for reply in [client.submit(request) for _ in range(number)]]


def test_the_key_is_required_and_not_in_the_process_list(server):
    response = httpx.post(server.url + "/generate", json=generation().payload())
    assert response.status_code == 401
    assert b"secret" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_samples_share_the_prompt_in_the_prefix_cache(server):
    """Those that come after the first one; the server computes at once what comes at once."""
    client = server.client()
    client.submit(generation(30)).result()
    sampled = several(client, generation(30), 3)
    assert len({tuple(one.token_ids) for one in sampled}) == 3  # the server's own top_k is 1
    assert min(one.cached_tokens for one in sampled) >= 11
    assert {one.weight_versions for one in sampled} == {("default",)}


@pytest.mark.parametrize("name", ["self_attn.qkv_proj.weight", "mlp.down_proj.weight"])
def test_it_shows_the_values_of_a_parameter(server, chunks, tmp_path, name):
    """In its shape, once equal to the trainer's and once not."""
    name = f"model.layers.1.{name}"
    suspect = Suspect(Target("server_0", server.client(), 1), Difference("", 0, name))

    def compared() -> str:
        return compare_values(chunks, [suspect], tmp_path, torch.float32)["server_0"]

    assert "every value is the same" in compared()
    changed = [p for n, p in chunks[0].named_parameters() if n.startswith("decoder.layers.1.")]
    before = [parameter.detach().clone() for parameter in changed]
    with torch.no_grad():
        for parameter in changed:
            parameter.flatten()[3] += 1
    found = compared()
    with torch.no_grad():
        for parameter, old in zip(changed, before, strict=True):
            parameter.copy_(old)
    assert " 1 of " in found or " 3 of " in found, found
    assert "values differ, the first at [0, 3]; there the trainer has " in found
    (file,) = tmp_path.glob("*.safetensors")
    assert load_file(file)["server"][0, 3] == pytest.approx(load_file(file)["trainer"][3] - 1)


def test_a_stop_id_ends_a_response_wherever_it_comes(server):
    stops = tuple(range(0, VOCABULARY, 4))
    request = generation(30, stop_token_ids=stops, max_new_tokens=32)
    sampled = several(server.client(), request, 16)
    assert not any(set(completion.token_ids[:-1].tolist()) & set(stops) for completion in sampled)
    assert any(completion.finish_reason == "stop" for completion in sampled)


def test_a_response_fills_the_students_window_and_continues_up_to_its_end(server):
    window, client = FIELDS["max_position_embeddings"], server.client()
    rest = window - 12
    whole = client.submit(generation(max_new_tokens=rest, stop_token_ids=())).result()
    assert len(whole.token_ids) == rest
    last = generation(max_new_tokens=1, stop_token_ids=())
    request = replace(last, token_ids=(*last.token_ids, *whole.token_ids[:-1]))
    assert len(client.submit(request).result().token_ids) == 1


def test_padding_rows_are_never_sampled(server):
    """With 100 of 128 rows a vocabulary, everything is sampled from and normalised over the 100."""
    client = server.client()
    narrow = generation(20, vocab_size=100)
    for completion in several(client, narrow, 8):
        assert max(completion.token_ids) < 100
    certain = replace(generation(vocab_size=6), token_ids=(3, 4, 5))
    total = sum(
        torch.tensor(completion.logprobs[0]).exp().item()
        for completion in {c.token_ids[0]: c for c in several(client, certain, 3)}.values()
    )
    assert total <= 1 + 1e-5


def test_a_prompt_beyond_the_window_is_refused(server):
    with pytest.raises(RefusedRequest, match="HTTP 400"):
        server.client().submit(generation(max_new_tokens=4000)).result()


@pytest.mark.parametrize("merged_ids", [(), (2, 9, 11)])
def test_served_teacher_equals_the_same_teacher_in_megatron(
    server, world, chunks, key_file, merged_ids
):
    samples, weights = _samples()
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "temperature": 1.0,
        "stop_ids": (2, 9, 11),
        "top_k": 4,
        "merged_ids": merged_ids,
    }
    ours = MegatronScorer(chunks, world, **settings)
    settings.pop("temperature")
    theirs = ServedScorer(True, **settings)
    progress: list[int] = []
    teacher = ServedTeacher(
        TeacherConfig(engine="sglang", urls=(server.url,), api_key_file=key_file),
        vocab_size=VOCABULARY,
        temperature=1.0,
        wanted=lambda _: theirs.wanted,
        patience_seconds=120.0,
        progress=lambda: progress.append(1),
    )
    assert teacher.self_test(range(3, 60)) < 1e-3
    batches = pack(_scored_by(teacher, samples), weights, max_tokens=64)
    for a, b in zip(ours.score(batches), theirs.score(batches), strict=True):
        torch.testing.assert_close(a.logprob_N, b.logprob_N, atol=1e-4, rtol=0)
        assert torch.equal(a.topk_ids_NK, b.topk_ids_NK)
        torch.testing.assert_close(a.topk_logprobs_NK, b.topk_logprobs_NK, atol=4e-3, rtol=0)
    assert len(progress) >= len(samples), "a long scoring phase is no hang for the watchdog"


def test_a_run_with_a_served_teacher_learns_the_same(server, key_file, tmp_path):
    """Servers sample, and the teacher is asked about each response as soon as it is finished; then
    the same rollouts are scored by the teacher in the trainer. One prompt's responses of each step
    are held back until the teacher has scored 16 others. It is asked about no golden solution."""
    settings = (
        "train.steps=2",
        f"tokenizer.path={_tokenizer_of_all_rows(tmp_path / 'tokenizer')}",
        f"student.architecture.vocab_size={VOCABULARY}",
        "teacher.architecture=null",
        f"rollout.sglang.api_key_file={key_file}",
    )
    self_tests, num_prompts = 2, 16
    compared = 4 + 32  # prompts and pairs of tokens, which the files score too
    sampled_prompts, asked, scored = itertools.count(), [], []

    def hold_back_the_first(body: bytes) -> bytes:
        if isinstance(json.loads(body), list) and next(sampled_prompts) % num_prompts == 0:
            enough = len(scored) + 16
            wait_until(lambda: len(scored) >= enough, "16 finished responses are scored")
        return body

    def note_scores(body: bytes) -> bytes:
        scored.append(body)
        return body

    with (
        serve(tmp_path, "student", *settings) as student,
        faulty_proxy(urls_of(student)[0], change=hold_back_the_first) as sampling,
        faulty_proxy(server.url, asked.append, note_scores) as scoring,
    ):
        served = train(
            tmp_path,
            "served",
            *settings,
            *external(sampling),
            "teacher.engine=sglang",
            f"teacher.urls=[{scoring}]",
            f"teacher.path={server.options.model}",
            f"teacher.api_key_file={key_file}",
        )
    sampled = [r for step in (1, 2) for r in rollouts(served, step)]
    assert asked.count("/generate") == self_tests + compared + len(sampled)
    own = train(
        tmp_path,
        "own",
        *settings,
        f"teacher.path={server.options.model}",
        "rollout.engine=replay",
        f"rollout.replay_from={served}",
    )
    for ours, theirs in zip(rows(own), rows(served), strict=True):
        for name in ("loss/total", "grad_norm"):
            assert math.isclose(ours[name], theirs[name], rel_tol=1e-4), name
        assert 0 < theirs["perf/teacher_waited"] < 1
        assert not {"perf/teacher_waited", "perf/servers_waited"} & ours.keys()


def test_a_server_of_another_teacher_is_refused(server, world, key_file, tmp_path):
    """One has another rotary base in its config.json, one a coarser type, one other weights."""
    path = Path(server.options.model)
    turned, changed = tmp_path / "turned", tmp_path / "changed"
    for directory in (turned, changed):
        shutil.copytree(path, directory)
    config = json.loads((path / "config.json").read_text())
    (turned / "config.json").write_text(json.dumps(config | {"rope_theta": 50.0}))
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 2
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    others = [
        SglangServer(replace(server.options, **options), tmp_path / f"{name}.log")
        for name, options in (("turned", {"model": str(turned)}), ("bf16", {"dtype": "bfloat16"}))
    ]

    def refusal(at: SglangServer, directory: Path) -> str:
        with pytest.raises(UserError, match="the servers are not this teacher") as error:
            compare(world, tmp_path, at.url, path=str(directory), api_key_file=key_file)
        return str(error.value)

    with started(*others):
        of_turned, of_bf16 = (refusal(each, path) for each in others)
    assert f"rope_theta: 50.0 in {turned}, 10000.0 in {path}; where one token" in of_turned
    assert "dtype: bfloat16 in the server, float32 in the files; tensors: all are equal" in of_bf16
    assert "e.g. model.layers.1.mlp.down_proj.weight" in refusal(server, changed)


def _tokenizer_of_all_rows(directory: Path) -> Path:
    """A tokenizer with as many tokens as the teacher has rows."""
    Tokenizer.load("synthetic").save(directory)
    backend = PreTrainedTokenizerFast.from_pretrained(directory)
    backend.add_tokens([f"<{number}>" for number in range(VOCABULARY - len(backend))])
    backend.save_pretrained(directory)
    return directory


def test_a_teacher_of_a_larger_vocabulary_is_refused(server, world, key_file):
    """Its probabilities would be normalised over tokens that the student does not have."""
    config = TeacherConfig(engine="sglang", urls=(server.url,), api_key_file=key_file)
    teacher = ServedTeacher(config, vocab_size=64, temperature=1.0, patience_seconds=120.0)
    with pytest.raises(ValueError, match=r"ids from 64 on.*teacher\.engine=megatron"):
        teacher.self_test(range(3, 60))


def test_each_source_has_its_teacher_which_reads_a_prompt_of_its_own(
    server, world, key_file, tmp_path
):
    """Scores are those of a plain forward over the teacher's prompt and the response."""
    samples = [
        replace(
            sample,
            prompt_id=f"code.jsonl:{index}" if index % 2 else sample.prompt_id,
            teacher_prompt_token_ids=tuple(range(5, 10 + 9 * index)),
        )
        for index, sample in enumerate(_samples()[0])
    ]
    asked: list[str] = []
    with faulty_proxy(server.url, asked.append) as second:  # a teacher that counts its requests
        served = ServedTeacher(
            TeacherConfig(
                engine="sglang",
                routes={"math": (server.url,), "coder": (second,)},
                api_key_file=key_file,
            ),
            vocab_size=VOCABULARY,
            temperature=1.0,
            wanted=lambda _: Wanted(top_k=4),
            patience_seconds=120.0,
            route_of={"code.jsonl": "coder"},
        )
        scored = _scored_by(served, samples)
    assert len([path for path in asked if path.startswith("/generate")]) == 2

    model = AutoModelForCausalLM.from_pretrained(server.options.model, dtype=torch.float32).eval()
    for sample in scored:
        prompt, response = sample.teacher_prompt_token_ids, sample.token_ids[sample.places]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits
        log_p_LV = logits[0, len(prompt) - 1 : -1].log_softmax(1)
        near, scores = {"atol": 1e-4, "rtol": 0}, sample.teacher_scores
        of_tokens = log_p_LV.gather(1, torch.tensor(response).long()[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(scores.logprobs_L), of_tokens, **near)
        listed = torch.from_numpy(scores.top_logprobs_LK).float()
        torch.testing.assert_close(listed, log_p_LV.topk(4, dim=1)[0], atol=4e-3, rtol=0)


def _scored_by(teacher: ServedTeacher, samples: list[Sample]) -> list[Sample]:
    run: Any = SimpleNamespace(served_teacher=teacher, world=SimpleNamespace(model_group=None))
    return begin_scoring(run, samples, 0)()


def _samples() -> tuple[list[Sample], SampleWeights]:
    samples = []
    generator = torch.Generator().manual_seed(0)
    for index, length in enumerate((3, 17, 9, 1)):
        ids = torch.randint(3, VOCABULARY, (12 + length,), generator=generator).tolist()
        last = {1: 11, 2: VOCABULARY - 1}.get(index, ids[-1])  # a stop token, the last id there is
        response = (*ids[12:-1], last)
        samples.append(sample_of("rollout", f"math:{index}", tuple(ids[:12]), response))
    return samples, weights_of(samples, 1, 1, 1)


def test_a_server_ends_with_its_owner(tmp_path, server):
    """A child process starts a server and is killed with SIGKILL."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from stable_opd_mcore.serving.process import ServerOptions, SglangServer\n"
        "options = ServerOptions(python=sys.argv[1], model=sys.argv[2])\n"
        "server = SglangServer(options, Path(sys.argv[3]))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, PYTHON, server.options.model, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    time.sleep(1.5)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not group_lives(pid), "the server ends")
