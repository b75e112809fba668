"""Answers that math-verify 0.9.0 misreads, rule by rule; the first examples are of public data."""

import re

import pytest

from stable_opd_mcore.evaluation.answers import plain_boxes
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.evaluation.grading_worker import is_right
from tests.real_data import real_data

SMALL_NUMBERS = [  # (gold, boxed answers that are right, boxed answers that are wrong)
    ("2.88e-19", [r"2.88 \times 10^{-19} \text{ J}", r"28.8 \cdot 10^{-20}"], ["5.76e-19", "0.0"]),
    ("1.325e-27", ["1.325e-27"], [r"1.325 \times 10^{-28}", "1.326e-27", "0"]),
    (r"\frac{1}{2^{99}}", ["2^{-99}"], [r"\frac{1}{2^{98}}"]),
    (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", [], [r"\frac{1}{3 \cdot 2^{2006}}"]),
    ("0.0000002", [r"2 \cdot 10^{-7}"], ["0.0000001", "0.00000024"]),
    (r"\{1e-20, 2\}", [r"\{2, 1e-20\}"], [r"\{3e-20, 2\}"]),
    ("[1e-20, 2]", ["[1e-20, 2]"], ["[3e-20, 2]"]),
    ("x = 6e-20", ["6e-20", "x = 6e-20"], ["3e-20", "x = 3e-20"]),
    (r"x = -5,\ p = \frac{14}{3}", [r"-5, \frac{14}{3}"], [r"-5, \frac{13}{3}"]),
    ("x^2/4 + y^2/3 = 1", ["x^2/16 + y^2/12 = 1/4"], []),
    (r"\frac{1}{300}", ["0.003333"], ["0.00333"]),  # six decimals, as before
    ("0.0005", [r"0.05\%"], []),
    ("6.02e23", [r"602\times10^{21}", "602" + "0" * 21], ["6.03e23", "601" + "0" * 21]),  # large
]
NUMBERS = [
    (r"-1./3", [r"-\frac13"], ["-1"]),  # Minerva
    (r"1 - \frac{1}{\mathrm{e}}", ["1-1/e"], [r"1 + \frac{1}{\mathrm{e}}"]),  # math-verify's tests
    (r"137 \frac{1}{2}", ["137.5", "137 1/2", r"137\tfrac12", r"137\ 1/2"], ["137", "1/2"]),  # MATH
    ("2 1/2", ["2.5", r"\frac52", r"x = 2\frac{1}{2}", r"2 1/2 \text{ hours}"], ["21/2", "1"]),
    ("-2.5", ["-2 1/2", r"-2 \frac 1 2"], ["-1.5"]),
    ("12 dollars", ["12", r"12 \text{ dollars}", "12 dollars"], ["13 dollars", "12 thousand"]),
    ("12", ["12 miles per hour"], ["12 million"]),
    ("2500000", [r"\$2.5\text{ million}", "2.5 million dollars"], ["2.5 billion", "2.5"]),
    ("6.02e23", ["6.02 x 10^{23}", r"6.02\text{ x }10^{23}"], []),
    ("120", ["C(10,3)", "C(10, 3)"], ["C(10,4)", "(10,3)"]),
    ("(10,3)", ["(10,3)"], ["C(10,4)"]),
    (r"\frac{7}{3}", ["2 and 1/3", r"2\text{ and }\frac13"], ["2 and 1/4", "2, 1/3"]),
    (r"1.6\times10^{-19}\text{ C}", ["1.6*10^-19", r"1.6\cdot10^-19"], ["1.6*10^-18"]),
    ("1000000", ["1.000.000"], ["1.000"]),
    (r"\frac{1}{2}", ["0.5 or 1/2", r"50\%\text{ or }0.5", r"0{.}5"], ["0.5 or 0.6"]),
]
TEXTS = [
    (r"\text{Evelyn}", ["Evelyn", r"\textbf{evelyn.}"], ["Eve"]),  # MATH
    ("np.arcsin(10/13)", ["np.arcsin(10/13)"], ["10/13"]),  # Minerva
    ("6:15 PM", [r"6{:}15 \text{ PM}", "18:15"], ["6:15 AM", "6:15", "18:16"]),
    ("18:15", [r"6:15\text{ p.m.}"], ["6:15 AM"]),
    ("no solution", [r"\text{No solutions}", r"\emptyset", "None"], ["0", "one solution"]),
    (r"\ln 2", [r"\log_e 2", r"\mathrm{ln}\,2"], [r"\log_{10} 2"]),
    ("4:30 p.m.", [r"\text{4:30 p.m.}", r"4:30\ \text{p.m.}"], [r"\text{4:45 p.m.}", "4"]),
    ("Alice and Bob", [r"\text{Alice}\text{ and }\text{Bob}"], [r"\text{Alice}"]),
    ("Tuesday, March 3", [r"\text{Tuesday, March 3}"], [r"\text{Tuesday, March 4}"]),
]
LISTS = [  # OlympiadBench's forms
    (
        r"$\frac{32}{9}$,$\frac{1}{2}$",
        [r"\frac12, \frac{32}{9}"],
        [r"\frac{1}{2}", r"\frac{32}{9}"],
    ),
    ("$f(x)=a x+b$, where $b$ is an arbitrary integer, and $a$ one with $g(a)=0$", ["ax+b"], ["0"]),
    ("$f(x)=x+22$ for all $x$", ["f(x)=x+22", "$f(x)=x+22$ for all $x$"], ["x"]),
    ("-2,-2", ["-2, -2"], ["-2"]),
    ("$2$; $3$", ["2, 3", "3; 2", r"2 \text{ and } 3"], ["2", "3"]),
    ("(a) $2$ (b) $3$", ["2, 3", "(a) $2$ (b) $3$"], ["3"]),
    ("$x=2$ where $y=3$", ["x=2, y=3", r"x=2 \text{ where } y=3"], ["y=3", "3"]),
    ("$1$, $2$, $3$, $4$, $5$, $6$, $7$", ["1,2,3,4,5,6,7"], ["7", "1,2,3,4,5,6"]),
    (
        r"5\text{ cm and }3\text{ cm}",
        ["5, 3", r"5\text{ cm}, 3\text{ cm}"],
        [r"5\text{ cm and }4\text{ cm}", "5"],
    ),
    ("$x=2$. So the answer is $5$.", ["5"], ["2"]),  # a solution: its answer counts
]
CHOICES = [  # the first of MATH
    (r"\text{(C)}", ["C", "(C) 12", r"\textbf{(C)}\ 12", "C. 12", "C: 12"], ["(B) 12", "12"]),
    ("12", [r"\textbf{(B)} \quad 12", "(B) 12"], ["(B) 13"]),
    (r"\textbf{(B)}\ 12", ["B", "12", "B) 12"], ["(C) 12", "(B) 13", "C", "13"]),
    ("B", ["B"], ["2B", "B12"]),
    ("B", [r"\text{(B) }A, C", "(B) 3, 4"], ["(B) or (C)", r"\text{(B), (C)}", "(B)/C"]),
    ("(B), (C)", ["(B), (C)", "BC", r"\text{C and B}"], ["(B)", "B, D", "ABC"]),
    ("AC", ["A, C", "A and C"], ["A", "A, B"]),
]  # fmt: skip
PERCENTS = [
    (r"50\%", ["50", "0.5", r"\frac12"], ["5", "0.05"]),
    ("62.5%", ["62.5", r"\frac58", r"62\frac12\%"], ["6.25"]),  # OlympiadBench
    (r"33\frac{1}{3}\%", [r"\frac13", r"33\frac13"], ["33"]),
    ("0.5", [], [r"0.5\%"]),
]
PLACES = [
    ("x=1,y=2", ["(1,2)", "1,2", "y=2, x=1"], ["(2,1)", "2,1", r"\{2,1\}"]),
    ("x=1,x=2", ["2,1"], ["2,3"]),
    ("3:2", ["3 to 2"], ["2 to 3"]),
    ("2,-2", ["x_1=2, x_2=-2", "x_{1}=-2; x_{2}=2"], ["x_1=2, x_2=2", "x_1=2"]),
    (
        "x=2,y=3",
        [
            r"\begin{aligned}x&=2\\y&=3\end{aligned}",
            r"\left\{\begin{array}{l}x=2\\y=3\end{array}\right.",
        ],
        [r"\begin{cases}x=3\\y=2\end{cases}"],
    ),
    ("1:2:3", ["1 : 2 : 3", "(1:2:3)", "a:b:c=1:2:3"], ["1:3:2", r"\frac16"]),
    (r"1:\sqrt{3}:2", [r"1:\sqrt3:2"], [r"1:2:\sqrt{3}"]),
    ("1,1,2", ["1,2,1"], ["1,2,2", "1,2"]),
    (r"\{7\}", ["7"], ["8"]),
]
SIGNS = [
    (r"2\sqrt{3}", ["2√3"], ["2√2"]),
    ("x^2+1", ["x²+1"], ["x³+1"]),
    (r"\frac52", ["2½", r"\boldsymbol{2.5}", r"\textcolor{red}{2.5}"], ["1½"]),
    (r"(-\infty,1)\cup[2,\infty)", ["(-∞,1)∪[2,∞)"], ["(-∞,1)∪(2,∞)"]),  # noqa: RUF001
    ("-7", ["–7", "－７。"], ["７"]),  # noqa: RUF001
    ("1,2", ["1，2"], []),  # noqa: RUF001
    (r"\varnothing", ["∅", r"\emptyset"], []),
    (r"\frac{1}{6}", [r"0.1\overline{6}", r"0.1\bar6", "0.1666..."], ["0.16", "0.16..."]),
    (r"\sqrt[3]{\frac14}", ["∛(1/4)"], ["√(1/4)"]),
    (r"\mathbb{R}", [r"\Bbb R", r"\mathbf{R}"], [r"\mathbb{Q}", "r"]),
    ("2023", [r"\underline{\textbf{2023}}"], []),
]
AROUND = [  # an answer with more around its value than the gold
    ("5", ["5 m/s", "5 cm²", "5 eV", "5 L", "€5", "5°"], ["5 x", "5 m - 1", "5 k"]),
    ("5N", ["5 N"], ["5"]),
    ("7", [r"\text{Answer: }7", r"\text{about } 7"], [r"\text{less than }7"]),
    ("1000", ["1 000"], ["1 00"]),
    ("7.07", [r"5\sqrt2\approx 7.07"], [r"5\sqrt2\approx 7"]),
    (r"(-\infty,2)\cup(2,\infty)", [r"x\neq2", r"\{x:x\ne 2\}"], [r"x\ne3", "2"]),
    ("[1,2)", [r"1\le x<2"], [r"1\le x\le 2"]),
    ("(1,2)", ["1<x<2", "2>x>1", r"\{x\mid 1<x<2\}"], [r"1\le x<2", "1<x<3"]),
    (r"(-\infty,3]", [r"x\le3", r"3\geq x"], ["x<3", r"x\ge 3"]),
    (r"(-\infty,-1)\cup(1,\infty)", [r"x<-1\text{ or }x>1"], [r"x<-1\text{ and }x>1", "x>1"]),
    ("5", ["Answer: 5", "The answer is 5", r"\text{The answer is 5}"], ["The answer is not 5"]),
    ("5", [r"\text{Area} = 5\text{ cm}^2", r"5 \square", r"\color{red}{5}", r"\Large{5}"], []),
    ("C", [r"\text{Option C}", "Answer: C", "choice (C)"], ["Option D", "not C", "C or D"]),
    ("12:30 PM", [r"\text{12:30 p.m.}"], [r"\text{12:30 a.m.}"]),
    ("100", ["₹100", "₩100", "100元", "US\\$100", "USD 100", r"\text{Rs. }100"], ["100万"]),
    ("R+C", ["R+C", "$R+C$"], []),
]
CHANGED = [  # what math-verify leaves out changes the value
    ("5", ["5", r"5\text{ cm}"], [r"5\text{ or more}", r"5\text{ at most}", r"\geq 5", r"\neq 5"]),
    (r"5\text{ or more}", [r"5\text{ or more}", "5 or more"], ["5", r"5\text{ or less}"]),
    (r"x \ge 5", [r"x \ge 5", r"5 \le x"], ["5", r"x \le 5"]),
    ("5", [], [r"5\mathrm{i}", r"5\text{i}", r"5\text{ million}"]),
    ("5", [], [r"5\text{ ft }6\text{ in}", r"5\text{ h }30\text{ min}", "5 ft 6 in"]),
    (
        r"5\text{ ft }6\text{ in}",
        [r"5\text{ feet }6\text{ inches}"],
        ["5", r"5\text{ ft }7\text{ in}"],
    ),
    ("2i", [r"2\mathrm{i}", "2 i"], ["2"]),
    ("11_2", ["11", "11_{2}"], ["11_3", "11_{10}"]),
    ("GM/r", ["GM/r", r"\frac{G M}{r}", "v = GM/r"], ["Gm/r", "GM/R"]),
    (r"\frac{1}{2} m v^2", [r"E = \frac{mv^2}{2}"], [r"\frac12 Mv^2"]),
    ("x+y", ["y+x"], ["X+Y"]),
    (r"\pi r^2", [r"A = \pi r^2"], [r"\pi R^2"]),
    ("5", [r"5~\text{km}"], [r"5\text{ ft }5\text{ in}", r"5\text{ point }5"]),
    ("9.8 m/s^2", ["9.8", r"9.8\text{ m/s}^2", "9.8 m/s^2"], ["9.9"]),
    (r"\frac{a}{b}", [r"\frac ab", r"\frac a b"], [r"\frac{A}{b}"]),
]
ROOTS = [
    (r"\sqrt{\frac{1}{2}}", [r"\sqrt\frac12", r"\sqrt \frac{1}{2}", "√½"], [r"\sqrt\frac13"]),
    (r"\sqrt\frac34", [r"\frac{\sqrt3}{2}", r"\sqrt{\dfrac{3}{4}}"], [r"\frac{\sqrt3}{4}"]),
    (r"\frac23", [r"\sqrt[3]\frac{8}{27}", r"\sqrt\frac{4}{9}"], [r"\sqrt\frac{8}{27}"]),
    (r"2\sqrt{\pi}", [r"2\sqrt\pi"], [r"\sqrt\pi"]),
]
VECTORS = [
    (
        r"2\mathbf{i}+3\mathbf{j}",
        [r"3\hat{\jmath}+2\hat{\imath}", "(2,3)", r"\begin{pmatrix}2\\3\end{pmatrix}"],
        [r"2\mathbf i+4\mathbf j", "(3,2)", r"\langle 2,3,1\rangle", r"2\mathbf{i}"],
    ),
    (r"\vec{i}-\vec{k}", ["(1,0,-1)", r"\langle 1,0,-1\rangle"], [r"\vec{i}+\vec{k}", r"\vec{i}"]),
    (r"3\vec{a}-\vec{b}", [r"-\mathbf{b}+3\mathbf{a}"], [r"3\vec{a}+\vec{b}", r"3\vec{a}"]),
    (r"3\mathbf{e}_1-\mathbf{e}_2", [r"-\mathbf{e}_2+3\mathbf{e}_1", "(3,-1)"], ["(3,1)"]),
    (
        r"\begin{pmatrix}1\\2\\3\end{pmatrix}",
        ["(1,2,3)", "[1,2,3]^T", r"\left[\begin{array}{c}1\\2\\3\end{array}\right]"],
        ["(1,2,4)", "(1,2)", r"\begin{bmatrix}1\\2\end{bmatrix}", "1"],
    ),
    (
        r"(\frac12,2t)",
        [r"\begin{bmatrix}0.5\\2t\end{bmatrix}"],
        [r"\begin{bmatrix}0.5\\2\end{bmatrix}"],
    ),
    (r"\frac12\begin{pmatrix}2\\4\end{pmatrix}", ["(1,2)", r"\frac12(2,4)"], ["(2,4)"]),
    ("(1,2,3)", [r"\left(1,2,3\right)^T"], [r"\left(1,2,4\right)^T"]),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", ["[[1,2],[3,4]]"], ["[[1,3],[2,4]]"]),
]  # fmt: skip
QUANTITIES = [
    (r"30^\circ 30'", [r"30.5^\circ", "30°30′", "30 degrees 30 minutes"], [r"30^\circ", "30°15′"]),  # noqa: RUF001
    (r"-1.51^\circ", [r"-1^{\circ}30'36''"], [r"-1^{\circ}30'37''", r"1^\circ30'36''"]),
    (
        r"1\text{ hour }30\text{ minutes}",
        [r"90\text{ minutes}", "1.5 hours", "1 h 30 min"],
        ["1 hour 20 minutes", "1", "90 hours", "1:20", "0:01:30"],
    ),
    (r"3\text{ hours }20\text{ minutes}", ["3:20", "200 min"], ["3:21", "20:3", "2:80"]),
    (r"60^\circ", [r"\frac{\pi}{3}", r"\frac{\pi}{3}\text{ radians}"], [r"\frac{\pi}{6}"]),
    ("2 days", [r"48\text{ hours}", "2"], ["2 hours"]),
]
WRITTEN_NUMBERS = [
    ("5", [r"\text{five}", "Five", "\u0665"], [r"\text{six}", "\u0666"]),
    ("21", [r"\text{twenty-one}", "\u06f2\u06f1"], [r"\text{twenty}"]),
    (r"\text{Seven}", ["7"], ["8"]),
    ("12.5", ["12,5", "\u0661\u0662\u066b\u0665"], ["12, 5", "125"]),
    ("0.5", ["0,5", r"0{,}5\text{ m}"], ["0,6", "0, 5"]),
    ("0,25", [r"\frac14"], ["25"]),
    ("1234", ["1,234"], ["1,23"]),
    ("60", [r"5\text{ dozen}"], ["5 dozen eggs or 6"]),
]  # fmt: skip
SEVERAL_FORMULAS = [
    ("$x=1$ or $x=2$", ["1,2", r"x=2 \text{ or } x=1"], ["x=2", "1"]),
    ("a) $2$ b) $3$", ["2, 3"], ["3"]),
    ("Minimum $1$, maximum $4$", ["1,4"], ["4", "1"]),
]
STRICT = [
    ("5", [], [r"5\text{ dozen}", "5_2", r"5_{3}"]),
    ("5", ["5_{10}"], []),
    ("x", ["x"], ["X"]),
    ("C", ["C"], ["c"]),
    ("(b)", ["b", "(b)"], ["B", "(B)"]),
    ("E", ["E", r"\text{(E)}"], ["e", r"\mathrm{e}", "2.718281828459045"]),
    ("e", ["e", r"\mathrm{e}"], ["E"]),
]


RULES = [
    *(*SMALL_NUMBERS, *NUMBERS, *TEXTS, *LISTS, *CHOICES),
    *(*PERCENTS, *PLACES, *SIGNS, *AROUND, *CHANGED),
    *(*ROOTS, *VECTORS, *QUANTITIES, *WRITTEN_NUMBERS, *SEVERAL_FORMULAS, *STRICT),
]


def test_rules():
    """An answer that is judged otherwise is shown with its gold."""
    for gold, right, wrong in RULES:
        answers = [*right, *wrong]
        verdicts = {each: is_right(f"It is $\\boxed{{{each}}}$.", gold) for each in answers}
        assert verdicts == {**dict.fromkeys(right, True), **dict.fromkeys(wrong, False)}, gold


BOXES = [
    (r"\boxed {7}", True),
    ("\\boxed\n{7}", True),
    (r"$\boxed{7.}$", True),
    (r"\boxed{7,\ }", True),
    (r"\boxed{ 7\quad}", True),
    (r"\fbox{7}", True),
    (r"\boxed7", True),
    (r"\boxed{\boxed{7}}", True),
    (r"\boxed {8.}", False),
    (r"\boxed{7!}", False),
    ("First \\boxed{7}. No.\nThe final answer is \\boxed{", False),
    ("First \\boxed{7}. No.\nThe final answer is \\boxed", False),
    (r"First \boxed{7}. No. It is $\boxed{\frac{1}{2}", False),
    (r"Fill \boxed{ in. It is \boxed{7}.", True),
    (r"\boxed{7} \boxed{}", True),  # an empty one withdraws nothing
    (r"The final answer is $7$. I hope it is correct. \boxed{1} \boxed{", True),  # Minerva
    ("so \\boxed{8\n#### 7", True),
    (r"It is \boxed{8} or \boxed{7}.", False),
    (r"It is $\boxed{8}$ or $x=\boxed{7}$.", False),
    (r"It is $\boxed{7}$ or $\boxed{7.0}$.", True),
    (r"They are $\boxed{8}$ and $\boxed{7}$.", False),
    (r"It is \boxed{8} or \boxed{9}. No, \boxed{7}.", True),
    ("#### 7 dollars", True),
]  # fmt: skip


def test_forms_of_the_box():
    assert {response: is_right(response, "7") for response, _ in BOXES} == dict(BOXES)


STATEMENTS = [
    ("7", True),
    ("7 dollars", True),
    ("7 m", True),
    ("7 because 8 is even", True),
    ("7. Or 8", True),
    ("7 or 7.0", True),
    ("7 or 8", False),
    ("$7$, 8", False),
    ("either 7 or 8", False),
    ("7 or more", False),
    ("at least 7", False),
    ("not 7", False),
    ("7x", False),
    ("7 million dollars", False),
    ("7 feet 6 inches", False),
]  # fmt: skip


@pytest.mark.parametrize("form", ["So the answer is {}.", "**Answer:** {}"])
def test_a_statement_without_a_box(form):
    found = {each: is_right(form.format(each), "7") for each, _ in STATEMENTS}
    assert found == dict(STATEMENTS)


LETTERS = [  # with a gold of B; with one of b the same in the other case
    ("The answer is (B).", True),
    ("**Answer:** B) Paris", True),
    ("The correct option is **B**", True),
    ("The answer is B because A, C and D are too small.", True),
    ("The answer is B, the only even one.", True),
    ("I choose B.", True),
    ("(B) is the correct answer", True),
    ("<answer> B </answer>", True),
    ("<answer>\n(B)\n</answer>", True),
    ("B", True),
    ("Is it (A)? No.\n\n**B**", True),
    ("Answer: B\n\nThe answer is the largest of all.", True),
    ("The answer is A. No, the answer is B.", True),
    ("Hence option (B).", True),
    ("<Answer>(B) Paris</Answer>", True),
    ("**B) Paris**", True),
    ("答案：B", True),  # noqa: RUF001
    ("故选 B", True),
    ("B) Paris\nC) Rome", False),
    ("The answer is B. No, the answer is A.", False),
    ("Answer: B or C", False),
    ("The answer is not B.", False),
    ("The answer is A", False),
    ("Answer: Bees", False),
    ("<answer> A </answer>", False),
]  # fmt: skip


def test_letters_without_a_box():
    for response, expected in LETTERS:
        assert is_right(response, "B") is expected, response
        small = re.sub(r"\b[ABC]\b", lambda found: found[0].lower(), response)
        assert is_right(small, "(b)") is expected, small
        assert not is_right(small, "B"), small


VALUES = [
    ("<answer> 4 </answer> after 9 steps", "4"),
    ("<answer>\n1/2\n</answer>", "0.5"),
    ("<answer>Natalia sold 72 clips.</answer> I checked it 3 times.", "72"),
    ("Answer: 2 1/2", "2.5"),
    ("答案是:42", "42"),
    ("The answer is yes.", "Yes"),
    ("The answer is x=2 and y=3.", "x=2,y=3"),
    (r"<answer>\begin{pmatrix}1\\2\end{pmatrix}</answer>", "(1,2)"),
    ("The answer is 2 3/4 cups.", r"\frac{11}{4}"),
    ("It takes 2½ hours.", "2.5"),
    ("The answer is \u0661\u0665.", "15"),
    ("The answer is five.", "5"),
    (r"The answer is (1, \sqrt\frac12)", r"(1, \frac{\sqrt2}{2})"),
    ("The answer is 90 minutes.", "1 hour 30 minutes"),
    ("The first option is 5. The total is 6.", "6"),
]  # fmt: skip


def test_values_without_a_box():
    for response, gold in VALUES:
        assert is_right(response, gold), response
        assert not is_right(response, "7"), response


@pytest.mark.parametrize(
    ("response", "last"),
    [  # a looping response's length: seconds if the time were quadratic
        (r"\boxed{" * 20_000, ""),
        (r"\boxed{a" + " " * 10**5 + "b}", "a" + " " * 10**5 + "b"),
        (r"{\boxed{1}" * 20_000, "1"),
    ],
)
def test_the_last_box_of_a_looping_response(response, last):
    assert plain_boxes(response)[1] == last


def test_published_golds_are_right_in_every_form_of_the_box():
    rows = [row for name in BENCHMARKS for row in load_benchmark(name, real_data("eval"))]
    for gold in (row.answer or "" for row in rows):
        bare = gold[1:-1] if gold.startswith("$") and gold.count("$") == 2 else gold
        for response in (f"\\boxed {{{bare}}}", f"$\\boxed{{{bare}.}}$", f"\\boxed{{{gold}}}"):
            assert is_right(response, gold), response
