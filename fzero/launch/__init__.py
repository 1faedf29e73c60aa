"""Starts ranks on one machine or many, watches them, and ends the job when one fails.

May import: common, comms, config. Begin with `fzero.launch.cli`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.launch.notebook import notebook_launch as notebook_launch
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "notebook": "notebook_launch",
            "": (
                "agent cli environment feed hostfile launchers preflight reaper rendezvous "
                "supervise"
            ),
        },
    )
