"""The license of published weights, and its text. The code of the model is licensed under Apache-2.0."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from gpt2small_hf.resources import resource

APACHE = resource("LICENSE")
TEXT, TEXT_OF_CODE = "LICENSE", "LICENSE-CODE"

MIT = Path(__file__).with_name("MIT.txt")
"""Its text, with a place for the holder of the copyright."""


@dataclass(frozen=True)
class License:
    """The license of the weights."""

    id: str
    """As on the Hub; `other` has a `name`, and a `link` or a `file`."""
    name: str | None = None
    link: str | None = None
    file: Path | None = None
    """Its text, to be published."""

    @property
    def label(self) -> str:
        """The name for the card: the SPDX identifier if it has one."""
        return self.name or _spdx(self.id) or self.id

    @property
    def page(self) -> str | None:
        """The address of its text: the given link, else the page of SPDX, if any."""
        spdx = _spdx(self.id)
        return self.link or (f"https://spdx.org/licenses/{spdx}.html" if spdx else None)

    @property
    def metadata_link(self) -> str | None:
        """`license_link` for the card's metadata, which only `other` has."""
        return None if self.id != "other" else self.link or TEXT


def _spdx(identifier: str) -> str | None:
    try:
        return canonicalize_license_expression(identifier)
    except InvalidLicenseExpression:
        return None


def write_license(
    folder: Path, license: License | None, *, native: bool, holders: Sequence[str] = (), year: str | None = None
) -> None:
    """Write the license texts of the weights, if it is known, and of the code, unless the folder is `native`.

    The text of the MIT license names the copyright `holders` and the `year`.
    """
    if license is not None and license.file is not None:
        shutil.copyfile(license.file, folder / TEXT)
    elif license is not None and license.id == "apache-2.0":
        shutil.copyfile(APACHE, folder / TEXT)
        return
    elif license is not None and license.id == "mit" and holders:
        holder = " ".join(filter(None, (year, ", ".join(holders))))
        text = MIT.read_text(encoding="utf-8").format(holder=holder)
        (folder / TEXT).write_text(text, encoding="utf-8", newline="\n")
    if not native:
        shutil.copyfile(APACHE, folder / TEXT_OF_CODE)
