"""Download one source package with the pip at hand: pip_fetch.py NAME VERSION FOLDER.

Run as a script by install_brainstorm, never imported: pip changes the process that it
is loaded into. `pip download` will not do, since it runs the package's setup.py to read
its metadata. So pip is asked for its list of files, and for its HTTP session: both obey
all of pip's settings, and both have been the same from pip 21 to 26.

Prints the file's path. Exit status 3: not on the index; 4: the index was not reached;
5: this pip is not as expected.
"""

from __future__ import annotations

import logging
import os
import sys

NOT_ON_INDEX, UNREACHABLE, UNKNOWN_PIP = 3, 4, 5


class Complaints(logging.Handler):
    """Collect what pip says about pages that it could not read, and its warnings."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.pages: list[str] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Could not fetch URL" in text:
            self.pages.append(text)
        elif record.levelno >= logging.WARNING:
            self.warnings.append(text)


def main(name: str, version: str, folder: str) -> int:
    try:
        from pip._internal.commands import create_command
        from pip._internal.exceptions import PipError
    except ImportError as error:
        print(f"pip cannot be loaded: {error}", file=sys.stderr)
        return UNKNOWN_PIP
    complaints = Complaints()
    logger = logging.getLogger("pip")
    logger.addHandler(complaints)
    logger.setLevel(logging.DEBUG)
    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary=:all:", name])
    try:
        with command.main_context():
            session = command.get_default_session(options)
            finder = command._build_package_finder(options, session)
            links = [
                candidate.link
                for candidate in finder.find_all_candidates(name)
                if str(candidate.version) == version
            ]
            if not links:
                return report_missing(complaints)
            return download(session, links[-1], folder)
    except PipError as error:
        print(error, file=sys.stderr)
        return UNREACHABLE
    except (AttributeError, TypeError) as error:
        import pip

        print(f"pip {pip.__version__}: {error!r}", file=sys.stderr)
        return UNKNOWN_PIP


def report_missing(complaints: Complaints) -> int:
    """Print why there is no file, and tell a page that is not there from no network."""
    unreached = [page for page in complaints.pages if "404" not in page]
    for text in [*complaints.warnings, *(unreached or complaints.pages)]:
        print(text, file=sys.stderr)
    return UNREACHABLE if unreached else NOT_ON_INDEX


def download(session, link, folder: str) -> int:
    """Write the file that `link` points to into `folder` and print its path."""
    path = os.path.join(folder, os.path.basename(link.filename))
    try:
        # Identity: the archive is wanted as it is, not unpacked on the way.
        answer = session.get(
            link.url.split("#", 1)[0], headers={"Accept-Encoding": "identity"}
        )
        answer.raise_for_status()
        content = answer.content
    except OSError as error:  # what requests raises is an OSError
        print(error, file=sys.stderr)
        return UNREACHABLE
    with open(path, "wb") as file:
        file.write(content)
    print(path)
    return 0


if __name__ == "__main__":
    # This folder holds modules of a package, which are not for pip to find.
    sys.path.pop(0)
    sys.exit(main(*sys.argv[1:]))
