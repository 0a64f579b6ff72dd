"""What is changed in a list of packages that cyclonedx-py made, so that it can be published."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote


def made_public(sbom: dict[str, Any]) -> dict[str, Any]:
    """Return a CycloneDX document without paths of this machine.

    A package that was installed from a file gets the address that it has on PyPI once it is
    uploaded.
    """
    root = sbom.get("metadata", {}).get("component", {})
    for each in (root, *sbom.get("components", ())):
        references = each.pop("externalReferences", [])
        kept = [reference for reference in references if not reference["url"].startswith("file:")]
        if kept:
            each["externalReferences"] = kept
        if each and "purl" not in each:
            each["purl"] = (
                f"pkg:pypi/{quote(each['name'].lower().replace('_', '-'))}@{quote(each['version'])}"
            )
    return sbom
