"""Standard output for a table whose rows may go to a file or a pipe."""

import sys


class PlainOutput:
    """Standard output without the code by which Chainer's PrintReport erases a terminal's rows."""

    def write(self, text):
        sys.stdout.write(text.replace("\033[J", ""))

    def flush(self):
        sys.stdout.flush()
