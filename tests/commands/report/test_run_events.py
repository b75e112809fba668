"""Events as the report shows them: titles, changed settings, evidence, hostile details."""

from stable_opd_mcore.commands.report.run_events import MAX_CHARACTERS, MAX_LINES, marks


def test_changed_settings_and_a_guards_action():
    events = [
        {
            "event": "settings_changed",
            "after_step": 3,
            "changes": {"optimizer.lr": [1e-6, 5e-7], "data.train.path": ["a", None]},
        },
        {
            "event": "guard",
            "after_step": 5,
            "action": "raise beta",
            "evidence": {"rates": {"truncation": 0.123456}, "steps": [1, 2]},
        },
        {
            "event": "guard_warn",
            "after_step": 6,
            "evidence": [{"metric": "stop/student_mass", "recent": 0.123456, "normal": 1}],
        },
    ]
    found = marks(events, run=1)
    assert [(mark["run"], mark["step"]) for mark in found] == [(1, 3), (1, 5), (1, 6)]
    assert [(mark["title"], mark["lines"]) for mark in found] == [
        ("settings changed", ["optimizer.lr: 1e-06 → 5e-07", "data.train.path: a → none"]),
        ("guard: raise beta", ["rates: truncation 0.1235", "steps: 1; 2"]),
        ("guard warn", ["evidence: metric stop/student_mass, recent 0.1235, normal 1"]),
    ]


def test_symptom_damage_and_measure_are_three_kinds():
    actions = ["warned", "damaged", "raised", "rolled_back", "stopped", "recovered", ["raised"]]
    events = [{"event": "guard", "after_step": 5, "action": action} for action in actions]
    kinds = [mark["kind"] for mark in marks([*events, {"event": "e", "after_step": 6}], run=0)]
    assert kinds == ["symptom", "damage", *["measure"] * 3, *["other"] * 3]


def test_long_deep_and_hostile_details_are_bounded_text():
    deep = {"x": 1}
    for _ in range(50):
        deep = {"in": deep}
    details = {f"key{i}": "\u202e" + "a" * 1000 for i in range(30)}
    (mark,) = marks(
        [{"event": "e\x00", "after_step": 0, "changes": {"k": "odd"}, "d": deep} | details], 0
    )
    assert mark["title"] == "e␀"
    assert mark["lines"][:2] == ["k: odd", "in: in in in 1 values"]
    assert mark["lines"][2] == "key0: �" + "a" * (MAX_CHARACTERS - 7) + "…"
    assert mark["lines"][MAX_LINES:] == [f"{32 - MAX_LINES} more"]
