"""Memory by component: which parts a config needs, and how they follow the layout."""

import json

import pytest

from stable_opd_mcore.commands.plan import memory
from stable_opd_mcore.commands.plan.plan import Plan, make_plan, offloadable
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.losses import output_head
from stable_opd_mcore.placement.hardware import GIB
from tests.commands.plan.cases import CONFIGS, NODE, QWEN_7B, config_7b

EMBEDDED = "rollout.engine=embedded"


def components(plan: Plan) -> dict[str, float]:
    return {item.name: item.bytes for item in plan.memory.components}


def test_weights_gradients_and_optimizer_follow_the_layout(tmp_path):
    held = components(make_plan(config_7b(tmp_path, EMBEDDED), NODE))
    of_rank = held["student weights"] / 2  # bf16
    assert of_rank == pytest.approx(7.6156e9 / 4, rel=1e-3)  # Qwen2.5-7B over four tensor ranks
    assert held["gradients, fp32"] == 4 * of_rank
    assert held["Adam's state"] == 12 * of_rank / 2  # over two data-parallel ranks
    assert held["teacher weights"] == held["reference weights"] == held["student weights"]
    assert held["KV cache"] == 128 * (256 + 8192) * 2 * 28 * 512 * 2 / 4


def test_low_rank_factors_need_neither_a_reference_nor_gradients_of_the_weights(tmp_path):
    lora = (EMBEDDED, "student.lora={rank: 32}")
    plan = make_plan(config_7b(tmp_path, *lora), NODE)
    held = components(plan)
    factors = held["student's low-rank factors"]
    assert held["gradients, fp32"] == 2 * factors
    assert held["Adam's state"] == 6 * factors / 2  # over two data-parallel ranks
    assert factors < held["student weights"] / 50
    assert "reference weights" not in held
    assert "teacher weights" not in held  # the teacher is the student's base
    other = make_plan(config_7b(tmp_path, *lora, "teacher.window=4096"), NODE)
    assert "teacher weights" in components(other)
    assert "reference weights" in components(
        make_plan(config_7b(tmp_path, *lora, "reference.path=x"), NODE)
    )
    full = make_plan(config_7b(tmp_path, EMBEDDED), NODE)
    assert plan.seconds.update < 0.75 * full.seconds.update
    alone = make_plan(config_7b(tmp_path, *lora, "teacher=null", "objective.name=grpo"), NODE)
    assert "frozen" not in str(alone.choice.remedy)


def test_a_live_teacher_is_the_student_in_memory(tmp_path):
    live = ("teacher={path: self, weights: live, prompt: '{{ solution }}'}", "kl.beta=0")
    full = (*live, "objective.name=gkd", "memory.offload=[frozen]")
    plan = make_plan(config_7b(tmp_path, EMBEDDED, *full), NODE)
    assert not components(plan).get("heads of the scorers")
    assert "teacher weights" not in components(plan)
    assert "frozen" not in offloadable(plan.run)


@pytest.mark.parametrize(
    ("override", "gone"),
    [
        ("kl.beta=0", "reference weights"),
        ("rollout.engine=sglang rollout.sglang.placement=colocated", "KV cache"),
        ("kl.estimator=k3", "hidden states of the scorers"),
    ],
)
def test_a_part_that_is_not_used_takes_nothing(tmp_path, override, gone):
    assert gone in components(make_plan(config_7b(tmp_path, EMBEDDED), NODE))
    plan = make_plan(config_7b(tmp_path, EMBEDDED, *override.split()), NODE)
    assert not components(plan).get(gone)


def test_another_padded_vocabulary_of_the_teacher_costs_a_copy_of_its_head(tmp_path):
    name, smaller = "teacher's head, cut as the student's", tmp_path / "smaller"
    smaller.mkdir()
    (smaller / "config.json").write_text(json.dumps(QWEN_7B | {"vocab_size": 151936}))
    other = (f"student.path={smaller}",)
    held = components(make_plan(config_7b(tmp_path, *other), NODE))
    assert held[name] == 2 * 151936 / 4 * 3584
    assert name not in components(make_plan(config_7b(tmp_path), NODE))
    one_rank = (*other, "parallel.tensor=1", "parallel.sequence=false")
    assert name not in components(make_plan(config_7b(tmp_path, *one_rank), NODE))


def test_of_teachers_in_turn_the_largest_is_on_the_gpu_and_all_are_on_the_host(tmp_path):
    (small := tmp_path / "small").mkdir()
    (small / "config.json").write_text(json.dumps(QWEN_7B | {"num_hidden_layers": 4}))
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(bytes(1000))
    named = "{path: b, teacher: code}, {path: c, teacher: tuned}"
    sources = f"data.train=[{{path: a, solution: null}}, {named}]"
    sources = sources.replace("solution: null", "columns: {solution: null}")
    turns = (
        sources,
        f"teacher.models.code.path={small}",
        f"teacher.models.tuned.adapter={adapter}",
        "objective.name=gkd",
        "memory.offload=[]",
    )
    plan = make_plan(config_7b(tmp_path, *turns), NODE)
    held, (whole,) = components(plan), plan.run.turn_bytes(0)[:1]
    assert held["the largest teacher's weights"] == whole == held["student weights"]
    assert held["the largest teacher's head"] == 2 * 152064 / 4 * 3584
    assert held["adapters of teachers, whole"] == 1000
    assert "teacher weights" not in held
    host = sum(plan.run.turn_bytes(0))
    assert whole < host < 2 * whole
    assert f"2 teachers take turns: {host / GIB:.1f} GiB of host memory" in plan.table()
    assert plan.seconds.offload == pytest.approx(host / (64e9 * 0.8))


def test_a_guard_that_acts_needs_the_reference_from_the_start(tmp_path):
    def held(*overrides: str) -> dict[str, float]:
        return components(make_plan(config_7b(tmp_path, EMBEDDED, "kl.beta=0", *overrides), NODE))

    acting = held("guard.policy=act")
    assert acting["reference weights"] == acting["student weights"]
    assert "reference weights" not in held("guard.policy=act", "guard.max_beta=0")


def test_an_average_of_bf16_weights_takes_four_bytes_a_parameter(tmp_path):
    held = components(make_plan(config_7b(tmp_path, "reference.update=ema"), NODE))
    assert held["reference's average, fp32"] == 2 * held["reference weights"]
    copied = components(make_plan(config_7b(tmp_path, "reference.update=every"), NODE))
    assert "reference's average, fp32" not in copied


def test_frozen_weights_in_fp8_take_one_byte_and_the_students_copies_two(tmp_path):
    fp8 = ("fp8.teacher=blockwise", "fp8.reference=tensorwise", "fp8.student=tensorwise")
    plain = components(make_plan(config_7b(tmp_path), NODE))
    held = components(make_plan(config_7b(tmp_path, *fp8), NODE))
    layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944
    matrices = 28 * layer / 4  # over four tensor ranks
    assert held["teacher weights"] == plain["teacher weights"] - matrices
    assert held["reference weights"] == held["teacher weights"]
    assert held["student weights"] == plain["student weights"]
    assert held["student weights in FP8, twice"] == 2 * matrices
    held = components(make_plan(config_7b(tmp_path, *fp8, "reference.update=every"), NODE))
    assert held["reference without FP8"] == plain["reference weights"]


def test_full_recompute_and_smaller_budgets_need_less(tmp_path):
    def update(*overrides: str) -> float:
        return make_plan(config_7b(tmp_path, *overrides), NODE).memory.bytes_in("update")

    recompute = [update(f"train.recompute={how}") for how in ("full", "selective", "none")]
    assert sorted(recompute) == recompute
    assert recompute[0] < update("train.micro_batch_tokens=16384") < update()


def test_the_largest_budget_fits_and_the_next_does_not(tmp_path):
    budget = make_plan(config_7b(tmp_path), NODE, gpu="h100").largest_micro_batch
    assert budget is not None
    for tokens, fits in ((budget, True), (budget + 1024, False)):
        config = config_7b(tmp_path, f"train.micro_batch_tokens={tokens}")
        assert make_plan(config, NODE, gpu="h100").memory.fits == fits


def test_where_everything_fits_the_largest_budget_is_a_ranks_share(tmp_path):
    few = config_7b(tmp_path, "rollout.prompts_per_step=2", "mixture.lambda=0")
    plan = make_plan(few, NODE)  # two ranks, four sequences of 256 + 4,096 tokens each
    assert plan.largest_micro_batch == 4 * 4352
    assert "any train.micro_batch_tokens fits: a rank has 17408 tokens" in plan.table()
    assert not make_plan(config_7b(tmp_path), NODE, gpu="h100").any_micro_batch_fits


def test_a_publish_gathers_the_embedding_and_its_buckets_hold_it(tmp_path, monkeypatch):
    def held(*overrides: str) -> dict[str, float]:
        config = config_7b(tmp_path, "rollout.engine=sglang", *overrides)
        return components(make_plan(config, NODE))

    embedding, name = 2 * 152064 * 3584, "weight sync: embedding, whole"
    assert held()["weight sync buckets"] == 2 * embedding  # more than WEIGHT_BUCKET_BYTES
    assert held()[name] == 2 * embedding  # shards, and joined
    one_rank = ("parallel.tensor=1", "parallel.sequence=false")
    assert name not in held(*one_rank)
    assert held(*one_rank, "parallel.pipeline=2")[name] == embedding  # another stage's
    monkeypatch.setattr(memory, "WEIGHT_BUCKET_BYTES", 2**31)
    assert held()["weight sync buckets"] == 2 * 2**31
    larger = ("student.path=models/gpt-oss-120b", "parallel.tensor=8")
    recipe = load_config(CONFIGS / "recipes/gpt_oss_20b_120b.yaml", larger)
    gate_up = 2 * 128 * 2 * 2880 * 2880  # of a layer's experts
    assert components(make_plan(recipe, NODE))["weight sync buckets"] == 2 * gate_up


def test_another_temperature_keeps_a_copy_of_the_off_policy_golden_logits(tmp_path, monkeypatch):
    # More rows in a block, so that the logits need more than a layer's backward pass.
    monkeypatch.setattr(memory, "BLOCK_ROWS", 4096)

    def logits(*overrides: str) -> float:
        held = components(make_plan(config_7b(tmp_path, *overrides), NODE))
        return held["loss, or backward of a layer"]

    off_policy = ("objective.name=gkd", "objective.on_policy_fraction=0.5")
    copy = logits("sampling.temperature=0.8", *off_policy) - logits(*off_policy)
    # bf16; four shards of as many times more rows
    assert copy == pytest.approx(2 * 4 * 4096 * 152064 / 4)
    assert logits("sampling.temperature=0.8") == logits()


def test_offloaded_parts_are_held_in_the_phases_that_need_them(tmp_path):
    def held(phase: str, *overrides: str) -> set[str]:
        memory = make_plan(config_7b(tmp_path, *overrides), NODE).memory
        return {item.name for item in memory.components if phase in item.phases}

    colocated = ("rollout.engine=sglang", "rollout.sglang.placement=colocated")
    server = "colocated server: weights, KV cache"
    publish = {"weight sync buckets", "weight sync: embedding, whole"}
    kept = "colocated server: what it keeps when released"
    assert held("rollout", *colocated) == {"student weights", server, kept} | publish
    assert kept in held("score", *colocated) & held("update", *colocated)
    memory = make_plan(config_7b(tmp_path, *colocated), NODE).memory
    (share,) = (item.bytes for item in memory.components if item.name == server)
    assert share == 139 / 2 * 2**30  # SGLang's --mem-fraction-static when colocated
    assert "teacher weights" in held("score", *colocated)
    assert "Adam's state" not in held("score", *colocated)
    assert "teacher weights" not in held("update", "memory.offload=[frozen]")
    assert "Adam's state" in held("score", "memory.offload=[frozen]")


def test_the_plan_knows_the_rows_of_a_block_of_the_loss():
    assert memory.BLOCK_ROWS == output_head.BLOCK_ROWS
