"""Settings that cannot work, by themselves or together, are refused with the remedy."""

import pytest

from stable_opd_mcore.config.training import COLLECTIVE_TIMEOUT_MINUTES
from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_of

LONGEST_WATCHDOG = COLLECTIVE_TIMEOUT_MINUTES / 4
STALE = "rollout.max_staleness=1"
SGLANG = "rollout.engine=sglang"
COLOCATED = f"{SGLANG} rollout.sglang.placement=colocated"
EXTERNAL = f"{SGLANG} rollout.sglang.placement=external"
SERVED = "teacher.engine=sglang teacher.urls=[http://a:1]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # models: one source of weights each
        ("student.path=a student.architecture={}", "path and architecture are both set"),
        ("teacher.path=a teacher.architecture={}", "path and architecture are both set"),
        ("teacher.engine=sglang", "sglang needs one of them, and only sglang reads them"),
        ("teacher.urls=[http://a:1]", "sglang needs one of them, and only sglang reads them"),
        ("teacher.routes.math=[http://a:1]", "needs one of them, and only sglang reads them"),
        (
            "teacher.engine=sglang teacher.urls=[http://a:1] teacher.routes.math=[http://b:1]",
            "and teacher.routes .several.: drop one",
        ),
        (
            "teacher.path=self teacher.models.math.path=a",
            r"teacher\.models with teacher\.path=self and .* set teacher\.path to one, or",
        ),
        ("teacher.models.math.window=9", r"teacher\.models\.math needs a path or"),
        ("teacher.models.math.path=a", r"teacher\.models\.math scores no rows: .*drop it, or set"),
        (
            "teacher.models.math.path=a data.train=[{'path':a,'teacher':math}]",
            r"so the model of teacher\.path scores no rows; set teacher\.path to one of them",
        ),
        (
            "teacher.models.math.path=a data.train=[{'path':a,'teacher':code},{'path':b}]",
            r"teacher 'code' of a is not a key of teacher\.models; name one of these: math",
        ),
        ("teacher.engine=sglang teacher.urls=[http://a:1] teacher.window=9", "teacher.window or"),
        (
            "teacher.path=self teacher.weights=live",
            r"weights=live and no teacher\.prompt: .*nothing to learn",
        ),
        ("teacher.path=a teacher.weights=ema", r"weights=ema with teacher\.path=a"),
        ("teacher.path=self teacher.window=9", r"teacher\.window=9 with teacher\.path=self"),
        (
            "teacher.path=self teacher.weights=live teacher.prompt=x fp8.teacher=tensorwise",
            r"fp8\.teacher=tensorwise with teacher\.weights=live",
        ),
        (
            "student.path=a student.lora.rank=4 reference.update=ema kl.beta=0.1",
            r"reference\.update=ema with student\.lora: .* set reference\.update=every",
        ),
        (
            "student.path=a student.lora.rank=4 reference.update=every kl.beta=1 reference.path=b",
            r"reference\.update=every with student\.lora, reference\.path=b and",
        ),
        (
            "student.path=a student.lora.path=b kl.beta=1 fp8.reference=tensorwise",
            r"fp8\.reference=tensorwise with student\.lora\.path .* set fp8\.reference=null",
        ),
        (
            "student.path=a student.lora.rank=4 teacher.path=self teacher.weights=ema",
            r"teacher\.weights=ema with student\.lora: .* set teacher\.weights=frozen",
        ),
        ("student.lora.rank=0", "student.lora.rank: Input should be greater than 0"),
        ("student.window=0", "student.window: Input should be greater than 0"),
        ("student.rope_theta=.inf", "student.rope_theta: Input should"),
        # rollouts
        (f"rollout.engine=replay rollout.replay_from=a {STALE}", "not sampled ahead; set max_stal"),
        ("rollout.partial=true", "set max_staleness to at least 1"),
        ("rollout.max_staleness=9", "max_staleness: Input should be less than or equal to 8"),
        (f"{COLOCATED} {STALE}", "servers that sample ahead need devices of their own"),
        ("rollout.routing_replay=true", "engine=embedded: only sglang servers send the experts"),
        (
            f"{SGLANG} {STALE} rollout.routing_replay=true rollout.partial=true",
            "routing_replay=true with rollout.partial=true: .* set one of them to false",
        ),
        ("rollout.engine=replay", "replay needs the directory of a run"),
        ("rollout.replay_from=runs/other", "replay needs the directory of a run"),
        ("rollout.importance_threshold=1", "importance_threshold: Input should be greater"),
        ("sampling.horizon_start=8", "horizon_steps=None: a growing horizon needs both"),
        ("sampling.horizon_steps=8", "horizon_start=None with sampling.horizon_steps=8"),
        (
            "sampling.max_new_tokens=8 sampling.horizon_start=8 sampling.horizon_steps=2",
            "horizon_start=8 is not below sampling.max_new_tokens=8",
        ),
        (EXTERNAL, r"external with sglang.urls=\[\]: external servers, and only"),
        (f"{SGLANG} rollout.sglang.urls=[http://a:1]", "disaggregated with sglang.urls="),
        (
            f"{EXTERNAL} rollout.sglang.urls=[http://a:1] rollout.sglang.sync=tensor",
            "servers that this run starts itself; set sglang.sync=null",
        ),
        (
            f"{COLOCATED} rollout.sglang.sync=distributed",
            "cannot hold one GPU twice, as trainer and as server; set sglang.sync=null",
        ),
        ("rollout.sglang.port=65536", "sglang.port: Input should be less than or equal to 65535"),
        # layout, watchdog, cold start
        ("parallel.sequence=true", "parallel.sequence=true with parallel.tensor=1"),
        ("parallel.virtual_pipeline=2", "virtual_pipeline=2 with parallel.pipeline=1"),
        ("parallel.expert=3 parallel.tensor=2", "expert=3 and parallel.tensor=2: one must"),
        ("parallel.tensor=0", "parallel.tensor: Input should be greater than 0"),
        (
            f"fault.watchdog_minutes={LONGEST_WATCHDOG + 1}",
            r"watchdog_minutes=361 .* time-out of 1440 minutes.* set at most 360, or null",
        ),
        ("optimizer.beta2=1", "optimizer.beta2: Input should be less than 1"),
        ("cold_start.steps=3", "cold_start.lr is required"),
        (
            "teacher.engine=sglang teacher.urls=[http://a:1] fp8.teacher=blockwise",
            "fp8.teacher=blockwise with teacher.engine=sglang",
        ),
        # sections that do not go together
        ("student={}", "neither student.path nor student.architecture is set"),
        ("tokenizer={}", "neither tokenizer.path nor student.path names a tokenizer"),
        (
            f"{SERVED} sampling.temperature=0.7",
            "temperature=0.7 .* scores prompts only at temperature 1.*set sampling.temperature=1",
        ),
        (
            "mixture.lambda=0.1 data.train.path=d.jsonl data.train.columns.solution=null",
            "mixture.lambda > 0 with no column of golden solutions in data.train: set data.train",
        ),
        (
            f"{SGLANG} fault.watchdog_minutes=40",
            "watchdog_minutes=40 .* may wait 40 minutes: .*; set it to more than that, or to null",
        ),
        (f"{SERVED} fault.watchdog_minutes=3", "watchdog_minutes=3 .* may wait 40 minutes"),
        (
            f"{SGLANG} memory.offload=[student]",
            "`student`.*placement=disaggregated; leave it out, or colocate SGLang servers",
        ),
        ("data.train=[]", "data: train is an empty list"),
        ("optimizer.lr=1e-5 optimizer.min_lr=1e-4", "min_lr=0.0001 exceeds optimizer.lr=1e-05"),
        ('data.train=[{"path":a,"wigth":1}]', "unknown key data.train.0.wigth; keys of data.train"),
        ('data.train=[{"path":a,"weight":0}]', "data.train.0.weight: Input should be"),
        (
            SERVED + ' data.train=[{"path":a,"teacher":b}]',
            "teacher 'b' of a is not a key of teacher.routes; name one of these: none",
        ),
        ("objective.jsd_beta=1", "objective.jsd_beta: Input should be less than 1"),
        ("objective.discount=1.1", "objective.discount: Input should be less than or eq"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_of(settings)
