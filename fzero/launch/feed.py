"""Runs a command whose input begins with a line of this process' environment, and ends when this process' own does.

    FZERO_INPUT=… python -I -S feed.py ssh host command…

For pdsh, which gives its commands no input: what other hosts set may be secret, and `ps` shows arguments to everybody. It is
run as a file of its own, once for each host, without anything that would have to be imported first.
"""

import os
import subprocess
import sys
import threading

if __name__ == "__main__":
    line = os.environ.pop("FZERO_INPUT") + "\n"
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, text=True)

    def feed() -> None:
        """Passes on the line and the end."""
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
