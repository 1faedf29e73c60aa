"""Runs a command whose input is a line from this process's environment, and then this
process's own input.

    FZERO_INPUT=… python -I -S feed.py ssh host command…

For pdsh, whose commands have no input: the variables for other hosts may be secret, and
`ps` shows arguments to all users. It is run as a script, once per host, and imports
nothing else.
"""

import os
import subprocess
import sys
import threading

if __name__ == "__main__":
    line = os.environ.pop("FZERO_INPUT") + "\n"
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, text=True)

    def feed() -> None:
        """Writes the line, and closes the command's input at the end of this process's
        input.
        """
        stdin = process.stdin
        assert stdin is not None
        try:
            stdin.write(line)
            stdin.flush()
            while os.read(0, 4096):
                pass
            stdin.close()
        except OSError:  # the command has ended
            pass

    threading.Thread(target=feed, daemon=True).start()
    code = process.wait()
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)  # the thread still reads
