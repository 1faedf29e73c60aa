"""Writes docs/deepspeed_names.md, the page of DeepSpeed's names:
`python tests/support/deepspeed_page.py`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NoReturn

from deepspeed_shape import RECORD

from fzero.deepspeed import alias, names
from fzero.deepspeed.missing import INSTEAD, instead_of

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed_names.md"
MOST_LACKING = 30
MOST = 75  # names in one row
WIDE = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero")

HEAD = """# DeepSpeed's names

Every public name of DeepSpeed 0.19.6 and 0.19.8, and what it is here in a process started with `fzero run --as-deepspeed`
([deepspeed.md](deepspeed.md#no-line-changed)). `python tests/support/deepspeed_page.py` makes this page from fzero's modules and
the names that `python tests/support/deepspeed_names.py` records of the two versions. † marks modules that 0.19.8 has no more.

- **same**: the name works, and can be called as DeepSpeed's; [deepspeed.md](deepspeed.md) says where it differs. Constants have
  DeepSpeed's values.
- **in part**: the name works, but not in everything: the last table has each difference of a signature, a default, a base, a
  public method, a field or a member of 0.19.6. `python tests/support/deepspeed_shape.py` finds them in an installed one; a name
  without any is **same**.
- **no effect**: it can be called, and fzero does not need it.
- **an error**: it can be imported, but raises when it is called, instantiated or read, with what to do instead.

`hasattr` is true for all four, as with DeepSpeed. A name that DeepSpeed does not have either raises an `AttributeError`, and a
module a `ModuleNotFoundError`, as usual. A package's row has the names that it imports from its modules, too.
"""
NO_EFFECT = re.compile(r"(does|changes) nothing|has no effect|no effect", re.IGNORECASE)


def what_is(module: str, name: str) -> str:
    """What a name of DeepSpeed is here: "same", "in part", "constant", "no effect" or
    "an error"; "" for a module.
    """
    where = names.origin(module, name)
    if where is None or where.kind == "modules":
        return ""
    found = alias.own_attribute(module, name) or alias.own_object(where, name)
    if found is None:
        return "constant" if where.kind == "constants" else "an error"
    made = found[0].__init__ if isinstance(found[0], type) else found[0]
    if getattr(made, "__annotations__", {}).get("return") in ("NoReturn", NoReturn):
        return "an error"
    first = " ".join((inspect.getdoc(found[0]) or "").partition("\n\n")[0].split())
    if callable(found[0]) and NO_EFFECT.search(first):
        return "no effect"
    return "in part" if str(where) in differences() else "same"


@cache
def differences() -> dict[str, list[str]]:
    """The differences of names from DeepSpeed's, as recorded, by the place where it
    defines them.
    """
    found: dict[str, list[str]] = json.loads(RECORD.read_text())
    return found


def public_names(module: str) -> list[str]:
    """The names that a row about a module lists: its own, and those that a package
    imports by name or from its own modules.
    """
    entry = names.modules()[module]
    given = {*entry.own}
    if entry.is_package:
        origins = {name: names.origin(module, name) for name in names.names_of(module)}
        given |= {*entry.imported} | {
            name for name, at in origins.items() if at and at.module.startswith(f"{module}.")
        }
    return sorted(name for name in given if not name.startswith("_"))


def page() -> str:
    """The page of all names."""
    here, missing = list[str](), defaultdict[str, list[tuple[str, str]]](list)
    for module in sorted(names.modules()):
        kinds = defaultdict[str, list[str]](list)
        for name in public_names(module):
            kinds[what_is(module, name)].append(name)
        if (
            kinds["same"]
            or kinds["in part"]
            or kinds["no effect"]
            or (kinds["constant"] and not kinds["an error"])
        ):
            here.append(row_of(module, kinds))
        else:
            missing[group_of(module)] += [(module, name) for name in kinds["an error"]]
    lines = [
        "## Modules of which fzero has names",
        "",
        "| `deepspeed.` | same | in part | no effect | an error |",
    ]
    lines += [
        "| --- | --- | --- | --- | --- |",
        *here,
        "",
        "## Modules of which every name is an error",
        "",
    ]
    lines += ["| `deepspeed.` | names | instead |", "| --- | --- | --- |"]
    for group, found in sorted(missing.items()):
        if found:
            lines.append(
                f"| `{group.partition('.')[2]}` | {listed(group, found)} | {instead_of(group)} |"
            )
    lines += [
        "",
        "## Names that are here in part",
        "",
        "| `deepspeed.` | differences |",
        "| --- | --- |",
    ]
    shown = {
        str(names.origin(m, n))
        for m in names.modules()
        for n in public_names(m)
        if what_is(m, n) == "in part"
    }
    lines += [
        f"| `{name.partition('.')[2]}` | {in_words(differences()[name])} |"
        for name in sorted(shown)
    ]
    return HEAD + "\n" + "\n".join(lines) + "\n"


def in_words(found: list[str]) -> str:
    """Differences as a cell: missing methods in one list; of many, their number."""
    lacks = [text.removeprefix("no .") for text in found if text.startswith("no .")]
    rest = [text for text in found if not text.startswith("no .")]
    made = [text for text in rest if text.startswith("made with")]
    if len(made) > 4:
        rest = [
            "made by `initialize` or by its own arguments",
            *(text for text in rest if text not in made),
        ]
    if lacks:
        few = (
            quoted(lacks)
            if len(lacks) <= MOST_LACKING
            else f"{len(lacks)} methods, such as {quoted(lacks[:5])}"
        )
        rest.append(f"without {few}")
    return "; ".join(rest).replace("|", "\\|")


def group_of(module: str) -> str:
    """The row of a module in the second table: the longest prefix that has its own
    advice; itself where that is too wide.
    """
    group = module
    while group not in INSTEAD:
        group = group.rpartition(".")[0]
    return module if group in WIDE else group


def row_of(module: str, kinds: dict[str, list[str]]) -> str:
    """One row of the table of modules that fzero has names of."""
    same = [quoted(kinds["same"])] if kinds["same"] else []
    same += [f"constants: {len(kinds['constant'])}"] if kinds["constant"] else []
    cells = (
        "; ".join(same),
        quoted(kinds["in part"]),
        quoted(kinds["no effect"]),
        quoted(kinds["an error"]),
    )
    return (
        f"| `{module.partition('.')[2] or 'deepspeed'}`{'†' if names.modules()[module].is_gone else ''} | "
        f"{' | '.join(cell or '–' for cell in cells)} |"
    )


def quoted(found: list[str]) -> str:
    """Names as code."""
    return ", ".join(f"`{name}`" for name in found)


def listed(group: str, found: list[tuple[str, str]]) -> str:
    """The names of a group of modules; of many, those of the package itself, and the
    number of others.
    """
    all_names, modules = {name for _, name in found}, {module for module, _ in found}
    if len(all_names) <= MOST:
        return quoted(sorted(all_names))
    own = sorted({name for module, name in found if module == group})
    rest = len(all_names) - len(own)
    return (
        quoted(own)
        + ("; " if own else "")
        + f"all {rest} {'other ' if own else ''}names of {len(modules)} modules"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
