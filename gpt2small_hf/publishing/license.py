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

MIT = """MIT License

Copyright (c) {holder}

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""


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
        (folder / TEXT).write_text(MIT.format(holder=holder), encoding="utf-8", newline="\n")
    if not native:
        shutil.copyfile(APACHE, folder / TEXT_OF_CODE)
