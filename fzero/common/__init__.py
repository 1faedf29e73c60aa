"""Small tools for all rooms: tables as text, byte units, ranges for profilers, counts
of operations, checks of arguments, files that are safe to read and write.

May import: sharding. Begin with `fzero.common.arguments`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.common.text_tables import print_report as print_report
else:
    __getattr__, __dir__, __all__ = door(__name__, {"text_tables": "print_report"})
