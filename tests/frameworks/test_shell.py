"""Launch scripts are followed as bash follows them: real bash is asked what it makes of the same text."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mist_megatron.errors import InputError
from mist_megatron.frameworks.shell.arithmetic import MOST_DEEP
from mist_megatron.frameworks.shell.conditions import Verdict, both
from mist_megatron.frameworks.shell.script import read_script

BASH = shutil.which("bash")
SCRIPTS = 300
MARK = "== a script ends here =="


def by_bash(scripts: list[str], tmp_path: Path) -> list[list[list[str]]]:
    """The words of each command `launch` that real bash would start; `launch` only prints them."""
    printer = "exec 9>&1\nlaunch() { printf '\\001run\\0' >&9; [ $# = 0 ] || printf '%s\\0' \"$@\" >&9; }\n"
    whole = "".join(f"(\n{printer}{script}\n) 2>/dev/null\nprintf '%s\\0' '{MARK}'\n" for script in scripts)
    (tmp_path / "all.sh").write_text(whole)
    done = subprocess.run(
        [str(BASH), "--noprofile", "--norc", "all.sh"],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        timeout=60,
        check=False,
    )
    told: list[list[list[str]]] = []
    runs: list[list[str]] = []
    for piece in done.stdout.decode("utf-8", "replace").split("\0")[:-1]:
        if piece == MARK:
            told.append(runs)
            runs = []
        elif piece == "\1run":
            runs.append([])
        else:
            runs[-1].append(piece)
    assert len(told) == len(scripts), done.stderr.decode()[:2000]
    return told


def by_us(script: str) -> list[list[str]]:
    read = read_script(script, "script")
    return [list(command.words[1:]) for command in read.commands if command.words[0] == "launch"]


WRITTEN = [
    "A=8; B=${A:-2}; C=${D:-4}; launch --tp $B --pp ${C}",
    'X="--a 1 --b 2"; launch $X "$X" ${X} end',
    'A=(--x 1 --y "two words"); A+=(--z); launch "${A[@]}" ${A[@]} ${#A[@]} "${A[*]}" ${A[1]} ${A[-1]}',
    "N=$((3 * (4 + 2) % 7)); M=$(( N << 3 | 1 )); launch $N $M $((N > 3 ? 10 : 20)) $[2+3]",
    "read -r -d '' A <<E\n --a 1\n  --b 2\nE\nlaunch $A \"$A\" end",
    "launch --a 1 `# a remark` --b 2 $(# another\n)",
    "X=${Y:=12}; launch $X $Y ${Z:+no} ${Y:+yes}",
    "launch --a \\\n  --b 2 \\\n  --c # comment --d\nlaunch next",
    "if [ $((1+1)) -eq 2 ]; then T=2; else T=3; fi; launch $T",
    'V=fp8; if [[ "$V" == fp* ]] && [ -n "$V" ]; then launch --"$V"; elif true; then launch no; fi',
    'case "7B" in 13B) S=40;; 7B|8B) S=32;; *) S=1;; esac; launch --num-layers $S',
    'for n in 1 2 {3..5}; do L+=" $n"; done; launch $L',
    "f() { local a=$1; R=$((a * 2)); launch $a $R $# \"$@\"; }; f 4 'x y'; launch $R ${a:-gone}",
    "P=/a/b/c.tar.gz; launch ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P/b/X} ${P//a/Y} ${P:1:3} ${#P}",
    "cat <<EOF >/dev/null\nlaunch inside\n$((1+1))\nEOF\nlaunch after",
    "cat <<-EOF >/dev/null\n\tlaunch inside\n\tEOF\nlaunch after",
    "cat <<EOF >/dev/null\nlaunch inside\n\tEOF\nlaunch still inside\nEOF\nlaunch after",
    "declare -A M=([small]=12 [large]=96); K=large; launch ${M[$K]} ${M[small]}",
    "A=1; A+=2; launch $A; A='q  r'; launch $A \"$A\"",
    'X="a;b"; Y=\'$X\'; eval "launch $X $Y" || true; launch tail',
    "I=0; while [ $I -lt 3 ]; do I=$((I+1)); [ $I -eq 2 ] && continue; launch $I; done",
    "for ((i=0; i<3; i++)); do launch $i; done; until true; do launch never; done",
    'set -x -e; launch "${@:-none}" "$*"',
    "A=a; B=A; launch ${!B} ${A^^} ${B,,} $'t\\tx' \"a\\\"b\" 'c\"d' e\\ f",
    "launch a >/dev/null 2>&1 b; launch c &>/dev/null; { launch d; }; (X=5; launch $X); launch ${X:-unset}",
    "! false && launch yes; true || launch no; false || launch or; [ 1 = 2 ] || { launch brace; }",
    "X=08; launch $((10#$X + 1)) $((0x10)) $((-7 / 2)) $((-7 % 3)) $((2**10)) $((1 && 0 || 1))",
    'A=(); launch "${A[@]}" end; B=("${A[@]}" x); launch "${B[@]}"',
    'X="1 2"; A=($X "$X"); launch ${#A[@]} "${A[@]:-z}"',
    "true; launch `echo 5` $(echo a b)",
    'L=32\nQ="\\\n  --layers $L \\\n  --hidden 4 \\\n"\nlaunch $Q',
    *(Path(__file__).parent / "written_scripts.txt").read_text("utf-8").split("\n---\n"),
]


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_written_scripts_give_what_bash_gives(tmp_path: Path) -> None:
    told = by_bash(WRITTEN, tmp_path)
    wrong = [
        (script, real, ours)
        for script, real in zip(WRITTEN, told, strict=True)
        if real != (ours := by_us(script))
    ]
    assert not wrong, wrong


def generated(random_: random.Random) -> str:
    """A script that assigns, decides, counts and repeats, and launches with what came of it."""
    names = ["A", "B", "TP", "GPUS", "ARGS", "X1"]
    arrays = ["LIST", "OPTS"]
    lines = [f"{name}={random_.randint(0, 40)}" for name in names] + ["LIST=(a 'b c')", "OPTS=()"]

    def number() -> str:
        operator = random_.choice(["+", "-", "*", "%", "/", "<<", "&", "|", "^", "==", "<", ">="])
        right = random_.choice([str(random_.randint(1, 9)), f"({random_.choice(names)} | 1)"])
        return f"$(( {random_.choice(['$', ''])}{random_.choice(names)} {operator} {right} ))"

    def value() -> str:
        name, other = random_.choice(names), random_.choice(names)
        return random_.choice(
            [
                number(),
                f"${name}",
                f"${{{name}}}",
                f"${{{name}:-7}}",
                f"${{NOT_SET:-{random_.randint(1, 9)}}}",
                f"${{{name}:+--flag}}",
                f'"${name} and  ${{{other}}}"',
                "'single $A \"x\"'",
                f"pre${{{name}}}post",
                f"--tp=${name}",
                f'"--a ${name} --b 2"',
                f"${{{name}%?}}",
                f"${{{name}#1}}",
                f"${{#{name}}}",
                f"${{{name}/1/x}}",
                f"${{{name}:0:1}}",
                r"a\ b",
                "$'x\\ty'",
                f"${{NOT_SET-${{{name}}}}}",
                '"${LIST[@]}"',
                "${OPTS[@]}",
                "${#LIST[@]}",
                "${LIST[0]}",
                '"${LIST[*]}"',
                "{x,y}",
                "{1..3}",
            ]
        )

    def statement(depth: int) -> list[str]:
        name, kind = random_.choice(names), random_.randint(0, 11)
        if kind <= 2:
            return [f"{name}={value()}"]
        if kind == 3:
            return [f"{random_.choice(arrays)}+=({value()} {value()})"]
        if kind == 4:
            return [f"{random_.choice(arrays)}=(", f"  {value()} # why", f"  {value()}", ")"]
        if kind == 5:
            return [f'{name}="${{{name}}} \\', f'   --more ${random_.choice(names)}"']
        if kind == 6:
            return [f"launch {value()} \\", f"   {value()} {value()}"]
        if depth > 2:
            return [f"export {name}={random_.randint(0, 99)}"]
        inner = [line for _ in range(random_.randint(1, 3)) for line in statement(depth + 1)]
        other = [line for _ in range(random_.randint(1, 2)) for line in statement(depth + 1)]
        test = random_.choice(
            [
                f'[ "${name}" = 7 ]',
                f'[ -n "${name}" ]',
                f"[[ ${name} == *1* ]]",
                '[ -z "$NOT_SET" ]',
                f'[[ "${name}" != 3 && -n $B ]]',
                f"(( {random_.randint(0, 9)} > 4 ))",
                "true",
                "! false",
            ]
        )
        if kind == 7:
            return [f"if {test}; then", *inner, "else", *other, "fi"]
        if kind == 8:
            return ["for i in 1 2; do", *inner, "done"]
        if kind == 9:
            return [
                f'case "${name}" in',
                f"  1*|7) {inner[0] if len(inner) == 1 else ':'};;",
                "  *)",
                *other,
                "  ;;",
                "esac",
            ]
        if kind == 10:
            return [f"{test} && {name}=5 || {name}=6"]
        return ["{", *inner, "}"]

    for _ in range(random_.randint(3, 9)):
        lines += statement(0)
    return "\n".join([*lines, 'launch "$A" $B "${LIST[@]}" ${OPTS[@]} "$TP" $ARGS'])


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_generated_scripts_give_what_bash_gives(tmp_path: Path) -> None:
    """Arithmetic over text that is no number stops bash in the middle: such scripts say nothing here."""
    random_ = random.Random(20)
    scripts = [generated(random_) for _ in range(SCRIPTS)]
    compared = 0
    for script, real in zip(scripts, by_bash(scripts, tmp_path), strict=True):
        read = read_script(script, "script")
        if read.opens:
            continue
        compared += 1
        assert by_us(script) == real, script
    assert compared > SCRIPTS * 0.6


BOMBS = {
    "doubling": "A=xxxxxxxx\n" + 'A="$A$A"\n' * 40 + "launch $A",
    "chained": "".join(f'V{n}="${{V{n - 1}}}${{V{n - 1}}}${{V{n - 1}}}"\n' for n in range(1, 40))
    + "launch $V39",
    "ten of 169 bytes": "\n".join(f"V{n}=" + f"$V{n + 1}" * 12 for n in range(10)) + "\nV10=x\nlaunch $V0",
    "loops": "for a in {1..300}; do\n" * 4 + "X=1\n" + "done\n" * 4,
    "endless": "while true; do A+=x; done; launch $A",
    "recursion": "f() { f $1$1; f $1; }; f xxxxxxxxxx; launch",
    "eval": 'A=\'eval "$A"\'; eval "$A"; launch',
    "branches": "if [ $1 = a ]; then A=1; else A=2; fi\nA=$A$A\n" * 60 + "launch $A",
    "nested": "if true; then\n" * 3000 + "fi\n" * 3000,
    "parentheses": "launch $((" + "(" * 5000 + "1" + ")" * 5000 + "))",
    "braces": "launch " + "${A:-" * 2000 + "}" * 2000,
    "outputs": "launch " + "$(echo " * 2000 + ")" * 2000,
    "digits": "launch $((" + "9" * 5000 + "))",
    "pattern": "A=" + "a" * 4000 + "; launch ${A//*a*a*a*a*b/x} ${A##*a*a*a*a*b}",
    "text": "launch " + "--a b " * 40_000,
    "megabytes": "x" * 60_000_000,
    "quotes": 'launch "' * 40_001,
    "arrays": "A=" + "(A=" * 2000,
    "heredocs": "cat <<A\n" * 5000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_short_texts_make_no_long_work(name: str) -> None:
    """Work is bounded: an answer or a refusal within seconds, whatever a script would make of itself."""
    start = time.process_time()
    with suppress(InputError):
        read_script(BOMBS[name], "script")
    assert time.process_time() - start < 8.0


def test_what_grows_is_named() -> None:
    with pytest.raises(InputError, match="grow"):
        read_script(BOMBS["doubling"], "run.sh")


def test_what_is_open_keeps_its_name() -> None:
    read = read_script("TP=${12}\nlaunch --tp $TP --pp ${PP:-2} --nodes $SLURM_NNODES", "run.sh")
    (command,) = read.commands
    assert [read.names_in(word) for word in command.words if "\0" in word] == [
        ("TP (${12})",),
        ("$SLURM_NNODES",),
    ]
    assert command.words[4] == "2"
    (command,) = read_script("TP=${12}\nlaunch $TP", "run.sh", {"TP": "8"}).commands
    assert command.words == ("launch", "8")


def test_ways_that_depend_on_what_is_open_are_joined() -> None:
    script = """
    AC=$1
    OPTIONS="--layers 2"
    if [ $AC = full ]; then OPTIONS="$OPTIONS --full"; elif [ $AC = no ]; then OPTIONS="$OPTIONS --no"; fi
    if [ -z "$2" ]; then echo usage; exit 1; fi
    if [ -z "$NAME" ]; then NAME=run; fi
    launch $OPTIONS $NAME
    """
    read = read_script(script, "run.sh")
    (command,) = read.commands
    assert command.words[:3] == ("launch", "--layers", "2") and command.words[-1] == "run"
    assert read.names_in(command.words[3]) == ("AC ($1)",)
    assert "--full" in read.opens[int(command.words[3].strip("\0"))].alternatives[0]


@pytest.mark.parametrize(
    "script", ["launch 'a", 'launch "a', "if true; then launch", "launch $(echo a", "A=(1 2"]
)
def test_what_bash_refuses_is_refused(script: str) -> None:
    with pytest.raises(InputError, match="line 1"):
        read_script(script, "run.sh")


@pytest.mark.parametrize("deep", [0, 1], ids=["as deep as may be", "deeper"])
@pytest.mark.parametrize("nested", ["({})", "!{}", "2**{}"])
def test_arithmetic_is_read_as_deep_as_it_says(nested: str, deep: int) -> None:
    """The whole is one level, and so is each pair of brackets, each sign and each power."""
    text = "1"
    for _ in range(MOST_DEEP - 1 + deep):
        text = nested.format(text)
    read = read_script(f"launch $(({text}))", "script")
    assert bool(read.opens) is bool(deep)


def test_all_that_is_read_is_open() -> None:
    (command,) = (read := read_script("A=1 B=2; read A B; launch $A $B", "script")).commands
    assert [read.names_in(word) for word in command.words[1:]] == [("$A",), ("$B",)]


def test_an_open_word_inside_an_open_text_keeps_what_it_may_be() -> None:
    """The second condition decides about a text that holds what the first one decided about."""
    script = "if [ $1 = a ]; then A=x; else A=y; fi\nif [ $2 = b ]; then B=$A; else B=z; fi\nlaunch $B $A"
    read = read_script(script, "script")
    of_b, of_a = (read.opens[int(word.strip("\0"))].alternatives for word in read.commands[0].words[1:])
    assert of_a == ("x", "y") and of_b == ("x y", "z")
    bare = read_script("if [ $2 = b ]; then B=$1; else B=z; fi\nlaunch $B", "script")
    assert bare.opens[int(bare.commands[0].words[1].strip("\0"))].alternatives == ("?", "z")


def test_tee_writes_the_file_that_it_names_if_any() -> None:
    assert read_script("tee ds.json <<E\n{}\nE\n", "x").files == {"ds.json": "{}\n"}
    assert read_script("tee <<E\n{}\nE\n", "x").files == {}


def test_what_holds_together_is_open_or_assumed_where_a_part_of_it_is() -> None:
    known, assumed, open_still = Verdict(True), Verdict(True, assumed=True), Verdict(None)
    assert both(known, known).holds is True
    assert both(known, open_still).holds is None and both(open_still, known).holds is None
    assert both(known, assumed).assumed and both(assumed, known).assumed
    assert not both(known, known).assumed
