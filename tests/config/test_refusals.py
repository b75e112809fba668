"""Settings that cannot work, by themselves or together, are refused with the remedy."""

import pytest

from stable_opd_mcore.config.training import COLLECTIVE_TIMEOUT_MINUTES
from stable_opd_mcore.errors import ConfigError
from tests.config.cases import remedied, run_of

LONGEST_WATCHDOG = COLLECTIVE_TIMEOUT_MINUTES / 4
STALE = "rollout.max_staleness=1"
SGLANG = "rollout.engine=sglang"
COLOCATED = f"{SGLANG} rollout.sglang.placement=colocated"
EXTERNAL = f"{SGLANG} rollout.sglang.placement=external"
OF_MATH = "data.train=[{'path':a,'teacher':math},{'path':b}]"
ROUTED = "teacher.engine=sglang teacher.routes.math=[http://a:1]"
GOLDEN_ALL = (
    "data.train.path=a data.train.columns.messages=m data.train.columns.answer=null "
    "data.train.columns.golden=all"
)
SERVED = "teacher.engine=sglang teacher.urls=[http://a:1]"


@pytest.mark.parametrize(
    ("settings", "message", "remedies"),
    [
        # models: one source of weights each
        (
            "student.path=a student.architecture={}",
            "path and architecture are both set",
            "-student.path | -student.architecture",
        ),
        (
            "teacher.path=a teacher.architecture={}",
            "path and architecture are both set",
            "-teacher.path | -teacher.architecture",
        ),
        (
            "teacher.engine=sglang",
            "sglang needs one of them, and only sglang reads them",
            "teacher.urls=[http://a:1] | teacher.routes.math=[http://a:1] | -teacher.engine",
        ),
        (
            "teacher.urls=[http://a:1]",
            "sglang needs one of them, and only sglang reads them",
            "teacher.engine=sglang | -teacher.urls",
        ),
        (
            "teacher.routes.math=[http://a:1]",
            "needs one of them, and only sglang reads them",
            "teacher.engine=sglang | -teacher.routes.math",
        ),
        (
            "teacher.engine=sglang teacher.urls=[http://a:1] teacher.routes.math=[http://b:1]",
            "and teacher.routes .several.: drop one",
            "-teacher.urls | -teacher.routes.math",
        ),
        (
            "teacher.path=self teacher.models.math.path=a",
            r"teacher\.models with teacher\.path=self and .* set teacher\.path to one, or",
            f"teacher.path=b {OF_MATH} | -teacher.path -teacher.models.math.path {ROUTED}",
        ),
        (
            "teacher.models.math.window=9",
            r"teacher\.models\.math needs a path, an architecture or",
            f"teacher.models.math.path=a {OF_MATH}",
        ),
        (
            "teacher.path=b teacher.models.math.adapter=a teacher.models.math.window=9",
            r"teacher\.models\.math has an adapter, so its window",
            f"-teacher.models.math.window {OF_MATH}",
        ),
        (
            "teacher.models.math.path=a",
            r"teacher\.models\.math scores no rows: .*drop it, or set",
            f"-teacher.models.math.path | {OF_MATH}",
        ),
        (
            "teacher.models.math.path=a data.train=[{'path':a,'teacher':math}]",
            r"so the model of teacher\.path scores no rows; set teacher\.path to one of them",
            "teacher.path=a -teacher.models.math.path data.train=[{'path':a}]",
        ),
        (
            "teacher.models.math.path=a data.train=[{'path':a,'teacher':code},{'path':b}]",
            r"teacher 'code' of a is not a key of teacher\.models; name one of these: math",
            f"{OF_MATH}",
        ),
        (
            "teacher.engine=sglang teacher.urls=[http://a:1] teacher.window=9",
            "teacher.window or",
            "-teacher.window",
        ),
        (
            "teacher.path=self teacher.weights=live",
            r"weights=live and no teacher\.prompt: .*nothing to learn",
            "teacher.prompt=x | teacher.weights=frozen",
        ),
        (
            "teacher.path=a teacher.weights=ema",
            r"weights=ema with teacher\.path=a",
            "-teacher.weights | teacher.path=self",
        ),
        (
            "teacher.path=self teacher.window=9",
            r"teacher\.window=9 with teacher\.path=self",
            "-teacher.window",
        ),
        (
            "teacher.path=self teacher.weights=live teacher.prompt=x fp8.teacher=tensorwise",
            r"fp8\.teacher=tensorwise with teacher\.weights=live",
            "fp8.teacher=null",
        ),
        (
            "student.path=a student.lora.rank=4 reference.update=ema kl.beta=0.1",
            r"reference\.update=ema with student\.lora: .* set reference\.update=every",
            "reference.update=every",
        ),
        (
            "student.path=a student.lora.rank=4 reference.update=every kl.beta=1 reference.path=b",
            r"reference\.update=every with student\.lora, reference\.path=b and",
            "reference.update=never | -reference.path",
        ),
        (
            "student.path=a student.lora.path=b kl.beta=1 fp8.reference=tensorwise",
            r"fp8\.reference=tensorwise with student\.lora\.path .* set fp8\.reference=null",
            "fp8.reference=null",
        ),
        (
            "student.path=a student.lora.rank=4 teacher.path=self teacher.weights=ema",
            r"teacher\.weights=ema with student\.lora: .* set teacher\.weights=frozen",
            "teacher.weights=frozen",
        ),
        (
            "student.lora.rank=0",
            "student.lora.rank: Input should be greater than 0",
            "student.lora.rank=1 student.path=a",
        ),
        (
            "student.window=0",
            "student.window: Input should be greater than 0",
            "student.window=1 student.path=a",
        ),
        (
            "student.rope_theta=.inf",
            "student.rope_theta: Input should",
            "student.rope_theta=1e4 student.path=a",
        ),
        (
            "train.share_prefixes=true parallel.context=2",
            "parallel.context=2: .* set one of the two to its default",
            "train.share_prefixes=false",
        ),
        # rollouts
        (
            f"rollout.engine=replay rollout.replay_from=a {STALE}",
            "not sampled ahead; set max_stal",
            "rollout.max_staleness=0",
        ),
        ("rollout.partial=true", "set max_staleness to at least 1", "rollout.max_staleness=1"),
        (
            "rollout.max_staleness=9",
            "max_staleness: Input should be less than or equal to 8",
            "rollout.max_staleness=8",
        ),
        (
            f"{COLOCATED} {STALE}",
            "servers that sample ahead need devices of their own",
            "rollout.sglang.placement=disaggregated | rollout.max_staleness=0",
        ),
        (
            "rollout.routing_replay=true",
            "engine=embedded: only sglang servers send the experts",
            "rollout.routing_replay=false",
        ),
        (
            f"{SGLANG} {STALE} rollout.routing_replay=true rollout.partial=true",
            "routing_replay=true with rollout.partial=true: .* set one of them to false",
            "rollout.routing_replay=false | rollout.partial=false",
        ),
        (
            f"{SGLANG} rollout.routing_replay=true rollout.sglang.speculative.algorithm=mtp",
            "routing_replay=true with rollout.sglang.speculative: which experts",
            "rollout.routing_replay=false | -rollout.sglang.speculative.algorithm",
        ),
        (
            "rollout.sglang.sync=disk rollout.sglang.speculative.algorithm=mtp",
            "sync=disk with sglang.speculative: SGLang reads such files into the draft",
            "rollout.sglang.sync=null",
        ),
        (
            "rollout.sglang.speculative.algorithm=eagle3",
            "algorithm=eagle3 without draft: name its directory",
            "rollout.sglang.speculative.draft=a",
        ),
        (
            "rollout.sglang.speculative.algorithm=mtp rollout.sglang.speculative.tokens=9",
            "top_k=1 with tokens=9: a chain of 3 steps has 4",
            "rollout.sglang.speculative.tokens=null | rollout.sglang.speculative.top_k=2",
        ),
        (
            "rollout.sglang.speculative.algorithm=mtp rollout.sglang.speculative.top_k=2",
            "top_k=2 without tokens: a tree needs",
            "rollout.sglang.speculative.tokens=8 | rollout.sglang.speculative.top_k=1",
        ),
        (
            "teacher.path=a teacher.verify=skip",
            "teacher.verify=skip with teacher.urls=.*only servers are compared",
            "-teacher.verify | teacher.engine=sglang teacher.urls=[http://a:1] "
            "fault.watchdog_minutes=60",
        ),
        (
            "rollout.engine=replay",
            "replay needs the directory of a run",
            "rollout.replay_from=a | -rollout.engine",
        ),
        (
            "rollout.replay_from=runs/other",
            "replay needs the directory of a run",
            "rollout.engine=replay | -rollout.replay_from",
        ),
        (
            "rollout.importance_threshold=1",
            "importance_threshold: Input should be greater",
            "rollout.importance_threshold=1.1",
        ),
        (
            "sampling.horizon_start=8",
            "horizon_steps=None: a growing horizon needs both",
            "sampling.horizon_steps=2 | -sampling.horizon_start",
        ),
        (
            "sampling.horizon_steps=8",
            "horizon_start=None with sampling.horizon_steps=8",
            "sampling.horizon_start=2 | -sampling.horizon_steps",
        ),
        (
            "sampling.max_new_tokens=8 sampling.horizon_start=8 sampling.horizon_steps=2",
            "horizon_start=8 is not below sampling.max_new_tokens=8",
            "sampling.horizon_start=7",
        ),
        (
            EXTERNAL,
            r"external with sglang.urls=\[\]: external servers, and only",
            "rollout.sglang.urls=[http://a:1] | -rollout.sglang.placement",
        ),
        (
            f"{SGLANG} rollout.sglang.urls=[http://a:1]",
            "disaggregated with sglang.urls=",
            "rollout.sglang.placement=external | -rollout.sglang.urls",
        ),
        (
            f"{EXTERNAL} rollout.sglang.urls=[http://a:1] rollout.sglang.sync=tensor",
            "servers that this run starts itself; set sglang.sync=null",
            "rollout.sglang.sync=null",
        ),
        (
            f"{COLOCATED} rollout.sglang.sync=distributed",
            "cannot hold one GPU twice, as trainer and as server; set sglang.sync=null",
            "rollout.sglang.sync=null",
        ),
        (
            "rollout.sglang.port=65536",
            "sglang.port: Input should be less than or equal to 65535",
            "rollout.sglang.port=65535",
        ),
        # layout, watchdog, cold start
        (
            "parallel.sequence=true",
            "parallel.sequence=true with parallel.tensor=1",
            "parallel.sequence=false | parallel.tensor=2",
        ),
        (
            "parallel.virtual_pipeline=2",
            "virtual_pipeline=2 with parallel.pipeline=1",
            "parallel.virtual_pipeline=null | parallel.pipeline=2",
        ),
        (
            "parallel.expert=3 parallel.tensor=2",
            "expert=3 and parallel.tensor=2: one must",
            "parallel.expert=4 | parallel.tensor=3",
        ),
        (
            "parallel.tensor=0",
            "parallel.tensor: Input should be greater than 0",
            "parallel.tensor=1",
        ),
        (
            f"fault.watchdog_minutes={LONGEST_WATCHDOG + 1}",
            r"watchdog_minutes=361 .* time-out of 1440 minutes.* set at most 360, or null",
            "fault.watchdog_minutes=360 | fault.watchdog_minutes=null",
        ),
        (
            "optimizer.beta2=1",
            "optimizer.beta2: Input should be less than 1",
            "optimizer.beta2=0.9",
        ),
        ("cold_start.steps=3", "cold_start.lr is required", "cold_start.lr=1"),
        (
            "teacher.engine=sglang teacher.urls=[http://a:1] fp8.teacher=blockwise",
            "fp8.teacher=blockwise with teacher.engine=sglang",
            "fp8.teacher=null | -teacher.engine -teacher.urls",
        ),
        # sections that do not go together
        (
            "student={}",
            "neither student.path nor student.architecture is set",
            "student.path=a | student.architecture={}",
        ),
        (
            "tokenizer={}",
            "neither tokenizer.path nor student.path names a tokenizer",
            "tokenizer.path=a | student.path=a",
        ),
        (
            f"{SERVED} sampling.temperature=0.7",
            "temperature=0.7 .* scores prompts only at temperature 1.*set sampling.temperature=1",
            "sampling.temperature=1 | teacher.engine=megatron -teacher.urls",
        ),
        (
            "mixture.lambda=0.1 data.train.path=d.jsonl data.train.columns.solution=null",
            "mixture.lambda > 0 with no column of golden solutions in data.train: set data.train",
            "data.train.columns.solution=solution | mixture.lambda=0",
        ),
        (
            f"{SGLANG} fault.watchdog_minutes=40",
            "watchdog_minutes=40 .* may wait 40 minutes: .*; set it to more than that, or to null",
            "fault.watchdog_minutes=41 | fault.watchdog_minutes=null",
        ),
        (
            f"{SERVED} fault.watchdog_minutes=3",
            "watchdog_minutes=3 .* may wait 40 minutes",
            "fault.watchdog_minutes=41 | fault.watchdog_minutes=null",
        ),
        (
            f"{SGLANG} memory.offload=[student]",
            "`student`.*placement=disaggregated; leave it out, or colocate SGLang servers",
            "-memory.offload | rollout.sglang.placement=colocated",
        ),
        ("data.train=[]", "data: train is an empty list", 'data.train=[{"path":a}]'),
        (
            "optimizer.lr=1e-5 optimizer.min_lr=1e-4",
            "min_lr=0.0001 exceeds optimizer.lr=1e-05",
            "optimizer.min_lr=1e-6",
        ),
        (
            'data.train=[{"path":a,"wigth":1}]',
            "unknown key data.train.0.wigth; keys of data.train",
            'data.train=[{"path":a,"weight":1}]',
        ),
        (
            'data.train=[{"path":a,"weight":0}]',
            "data.train.0.weight: Input should be",
            'data.train=[{"path":a,"weight":1}]',
        ),
        (
            SERVED + ' data.train=[{"path":a,"teacher":b}]',
            r"teacher 'b' of a is not a key of teacher\.routes; drop it, or add it to",
            'data.train=[{"path":a}] | -teacher.urls teacher.routes.b=[http://a:1]',
        ),
        (
            "objective.jsd_beta=1",
            "objective.jsd_beta: Input should be less than 1",
            "objective.jsd_beta=0.9",
        ),
        (
            "objective.name=gkd kl.target=0.1",
            r"kl\.target=0\.1 with kl\.beta=0: .*set kl\.beta > 0",
            "kl.beta=0.1 | -kl.target",
        ),
        (
            "rollout.prefix.first=1",
            "first without `by`: set by=golden or by=teacher, or drop it",
            f"rollout.prefix.by=golden {GOLDEN_ALL} | -rollout.prefix.first",
        ),
        (
            f"rollout.prefix.by=golden rollout.prefix.first=3 rollout.prefix.last=2 {GOLDEN_ALL}",
            r"first=3 exceeds rollout\.prefix\.last=2; lower it",
            "rollout.prefix.first=2",
        ),
        (
            "rollout.prefix.by=golden",
            "set it where conversations do, or drop",
            f"{GOLDEN_ALL} | -rollout.prefix.by",
        ),
        (
            "data.train.path=a data.train.columns.golden=all",
            "golden=all without messages",
            "data.train.columns.messages=m data.train.columns.answer=null | "
            "data.train.columns.golden=last",
        ),
        (
            "teacher.models.math.path=b teacher.models.math.chat_template_kwargs={a:1}",
            "has chat_template_kwargs, but .*; drop them",
            f"-teacher.models.math.chat_template_kwargs {OF_MATH}",
        ),
        (
            "run.name=r run.directory=~/runs",
            "only a shell replaces ~; write the path",
            "run.directory=/root/runs",
        ),
        (
            "objective.discount=1.1",
            "objective.discount: Input should be less than or eq",
            "objective.discount=1",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, message, remedies):
    with pytest.raises(ConfigError, match=message):
        run_of(settings)
    remedied(settings, remedies)
