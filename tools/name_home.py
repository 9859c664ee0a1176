"""Writes a repository's address into a checkout's README.md and pyproject.toml, before a package is built.

    python tools/name_home.py https://github.com/OWNER/NAME v1.2.3

On a package index there are no files beside the page: links and pictures need the whole address, at the
version that is published. A checkout has none, since a copy of the repository lives elsewhere.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?P<target>[^()\s]+)\)")
_CODE = re.compile(r"^```.*?^```[^\n]*$", re.DOTALL | re.MULTILINE)


def absolute(text: str, home: str, version: str) -> str:
    """Markdown with whole addresses in place of paths; code, whole addresses and places of the page stay."""

    def put(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}{link['text']}({home}/{kind}/{version}/{target})"

    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(put, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(put, text[end:])])


def with_urls(text: str, home: str) -> str:
    """A pyproject.toml with the addresses that an index shows. ValueError where it has some."""
    if "[project.urls]" in text:
        raise ValueError("pyproject.toml has [project.urls] already")
    names = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md",
             "Issues": "/issues"}  # fmt: skip
    lines = [f'{name} = "{home}{path}"' for name, path in names.items()]
    return text.replace(
        "[project.scripts]", "\n".join(["[project.urls]", *lines, "", "[project.scripts]"]), 1
    )


def main() -> None:
    """Change both files where they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", help="https://github.com/OWNER/NAME")
    parser.add_argument("version", help="a tag or a commit")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1])
    asked = parser.parse_args()
    if not re.fullmatch(r"https://[^\s/]+/[^\s/]+/[^\s/]+", asked.home):
        parser.error(f"{asked.home} is no address such as https://github.com/OWNER/NAME")
    readme, project = asked.folder / "README.md", asked.folder / "pyproject.toml"
    urls = with_urls(project.read_text(), asked.home)
    readme.write_text(absolute(readme.read_text(), asked.home, asked.version))
    project.write_text(urls)
    print(f"{readme} and {project} name {asked.home} at {asked.version}")


if __name__ == "__main__":
    main()
