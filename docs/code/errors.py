"""The list of all errors, made from the source:
`raise Name(f"owner: rule, got value; fix")` is a row of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

ROOMS = {
    "config": "Configuration",
    "plans": "Plans",
    "step.py": "The step",
    "runtime": "The step",
    "comms": "Ranks and collectives",
    "graph": "Compiled steps",
    "checkpoint": "Checkpoints",
    "storage": "State in other memory",
    "resharding": "Changing a job",
    "optim": "Optimizers",
    "simulation.py": "Simulation",
    "testing": "Test kit",
    "estimation": "Planning",
    "cli": "Command line",
    "profiling": "Profiling",
    "launch": "Launching",
    "tuning": "Tuning",
    "deepspeed": "DeepSpeed's names",
    "deepspeed/engine": "The engine",
    "deepspeed/formats": "Checkpoints",
    "deepspeed/integrations": "Trainer",
    "generation": "Generation",
    "attention": "Sparse attention",
    "compression": "Compression",
}
"""The heading of a room's errors, or of a folder's in a room; rooms without one are
under "Other".
"""


class Message(NamedTuple):
    heading: str
    kind: str
    rule: str
    fix: str


def messages() -> Iterator[Message]:
    """Every message that the source raises or returns as an error, with `‹…›` for what
    is filled in.
    """
    for package in ("fzero", "sharding"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            heading = (
                "Specs and layouts"
                if package == "sharding"
                else ROOMS.get("/".join(parts[1:3])) or ROOMS.get(parts[1], "Other")
            )
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    kind, text = (
                        ast.unparse(node.exc.func),
                        text_of(node.exc.args[0]) if node.exc.args else "",
                    )
                    if (
                        re.fullmatch(r"(\w+\.)*\w*(Error|Exception|Exit)", kind)
                        and len(text.split()) > 3
                    ):
                        rule, _, fix = text.rpartition("; ")
                        yield Message(
                            heading, kind.rpartition(".")[2], rule or text, fix if rule else ""
                        )


def text_of(node: ast.expr) -> str:
    """The text of a string or an f-string; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"‹{name_of(part)}›"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


def name_of(part: ast.expr) -> str:
    """What is filled in, in short: the last name of the expression."""
    assert isinstance(part, ast.FormattedValue)
    names = [
        n.attr if isinstance(n, ast.Attribute) else n.id
        for n in ast.walk(part.value)
        if isinstance(n, ast.Attribute | ast.Name)
    ]
    return names[0] if names else "…"


def page(introduction: str) -> str:
    """The page: the introduction, and the messages by room, in the order of their first
    words.
    """
    lines, found = (
        [introduction.rstrip(), ""],
        sorted(
            {*messages()},
            key=lambda m: (m.heading, owner_of(m).lower(), owner_of(m), m.rule, m.kind),
        ),
    )
    for heading in sorted({message.heading for message in found}):
        lines += ["", f"## {heading}"]
        owner = ""
        for message in (message for message in found if message.heading == heading):
            if owner_of(message) != owner:
                owner = owner_of(message)
                lines += ["", f"### {cell(owner)}", ""]
            fix = f"<br>**Fix:** {cell(message.fix)}." if message.fix else ""
            lines.append(f"- {cell(message.rule)} (`{message.kind}`){fix}")
    return "\n".join([*lines, ""])


def owner_of(message: Message) -> str:
    """The call or the key that the message begins with; "other" where what is filled in
    begins it.
    """
    owner = message.rule.partition(":")[0]
    return (
        owner if ":" in message.rule and len(owner.split()) <= 2 and "‹" not in owner else "other"
    )


def cell(text: str) -> str:
    """A message as text of a page, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", " ".join(text.split()))
