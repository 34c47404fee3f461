"""The rules for `--kv-transfer-config` and `--additional-config` of a Decode node that keeps preempted requests."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload_connector.cli import names
from offload_connector.cli.budget import Deployment
from offload_connector.cli.findings import ERROR, NOTE, WARNING, Finding
from offload_connector.config import DEFAULT_TOTAL_BYTES, KEYS, PER_RANK, ROLE, SHARE_PREFIXES, TOTAL, VERIFY
from offload_connector.config import OffloadConfig as Settings

TRANSFER = "--kv-transfer-config"
ADDITIONAL = "--additional-config"
EXTRA = "kv_connector_extra_config"


@dataclass
class Transfer:
    """What the rules have learnt of a kv-transfer-config.

    Attributes:
        role: the top level's kv_role.
        has_offload: the connector is in it, alone or as a child.
        per_rank: its budget in bytes, None where that is not valid.
        findings: what was found.
    """

    role: Any = None
    has_offload: bool = False
    per_rank: int | None = None
    findings: list[Finding] = field(default_factory=list)

    def add(self, level: str, where: str, message: str) -> None:
        self.findings.append(Finding(level, where, message))


def lint_transfer(config: Any, deployment: Deployment) -> Transfer:
    """Check vLLM's `--kv-transfer-config`; `deployment` is what `cpu_bytes_to_use` is divided by."""
    found = Transfer()
    if not isinstance(config, Mapping):
        found.add(ERROR, TRANSFER, f"this is {_kind(config)}; write an object, {{...}}")
        return found
    found.role = config.get("kv_role")
    _lint_entry(config, TRANSFER, found)
    extra = _extra(config)
    if config.get("kv_connector") != names.MULTI:
        if config.get("kv_connector") == names.CONNECTOR:
            _lint_offload(config, TRANSFER, deployment, found)
        return found
    children = extra.get(names.CHILDREN)
    where = f"{TRANSFER}.{EXTRA}.{names.CHILDREN}"
    if not isinstance(children, list) or not children:
        found.add(ERROR, where, "MultiConnector needs a list of connectors here")
        return found
    for key in extra:
        if key in KEYS:
            found.add(ERROR, f"{TRANSFER}.{EXTRA}.{key}", f"belongs into the {EXTRA} of the {names.CONNECTOR} child")
    for index, child in enumerate(children):
        _lint_child(child, f"{where}[{index}]", deployment, found)
    if sum(isinstance(c, Mapping) and c.get("kv_connector") == names.CONNECTOR for c in children) > 1:
        found.add(ERROR, where, f"{names.CONNECTOR} is there more than once; each would take its budget; keep one")
    return found


def _lint_child(child: Any, where: str, deployment: Deployment, found: Transfer) -> None:
    if not isinstance(child, Mapping):
        found.add(ERROR, where, f"this is {_kind(child)}; write an object, {{...}}")
        return
    _lint_entry(child, where, found)
    if names.POLICY in child:
        found.add(
            ERROR,
            f"{where}.{names.POLICY}",
            f"has no effect in a child; move it to the top level, beside kv_connector {names.MULTI}",
        )
    if child.get("kv_connector") == names.CONNECTOR:
        _lint_offload(child, where, deployment, found)
    elif child.get("kv_role") in names.ROLES and found.role in names.ROLES and child["kv_role"] != found.role:
        found.add(WARNING, f"{where}.kv_role", f"is {child['kv_role']!r}, but the top level has {found.role!r}")


def _lint_entry(entry: Mapping[str, Any], where: str, found: Transfer) -> None:
    """Check what every connector's entry has in common."""
    for key in entry:
        if key in KEYS:
            found.add(ERROR, f"{where}.{key}", f"belongs one level deeper, into {EXTRA}")
        elif key not in names.TRANSFER_KEYS:
            found.add(ERROR, f"{where}.{key}", f"vLLM knows no such key{_meant(key, names.TRANSFER_KEYS)}")
    connector = entry.get("kv_connector")
    if not isinstance(connector, str):
        found.add(ERROR, f"{where}.kv_connector", f"is {connector!r}; write the connector's name")
    elif connector not in (names.CONNECTOR, names.MULTI) and (
        close := difflib.get_close_matches(connector, (names.CONNECTOR, names.MULTI), cutoff=0.85)
    ):
        found.add(ERROR, f"{where}.kv_connector", f"there is no {connector!r}; did you mean {close[0]!r}?")
    role = entry.get("kv_role")
    if role not in names.ROLES:
        value = "is missing" if role is None else f"is {role!r}"
        found.add(ERROR, f"{where}.kv_role", f"{value}; write one of {', '.join(names.ROLES)}")
    policy = entry.get(names.POLICY, names.POLICIES[0])
    if policy not in names.POLICIES:
        found.add(ERROR, f"{where}.{names.POLICY}", f"is {policy!r}; write one of {', '.join(names.POLICIES)}")
    if not isinstance(entry.get(EXTRA, {}), Mapping):
        found.add(ERROR, f"{where}.{EXTRA}", f"is {_kind(entry[EXTRA])}; write an object, {{...}}")


def _lint_offload(entry: Mapping[str, Any], where: str, deployment: Deployment, found: Transfer) -> None:
    """Check the connector's own entry, by the rules that the connector itself applies when it starts."""
    found.has_offload = True
    role = entry.get("kv_role")
    if role in names.ROLES and role != ROLE:
        found.add(ERROR, f"{where}.kv_role", f"is {role!r}; this connector serves Decode nodes: write {ROLE!r}")
    if where != TRANSFER and found.role in names.ROLES and found.role != ROLE:
        found.add(ERROR, f"{TRANSFER}.kv_role", f"is {found.role!r}; on a Decode node write {ROLE!r}")
    extra, ranks = _extra(entry), deployment.ranks
    before = len(found.findings)
    for key, value in extra.items():
        place = f"{where}.{EXTRA}.{key}"
        if key not in KEYS:
            found.add(ERROR, place, f"there is no such key{_meant(key, KEYS)}")
            continue
        try:
            Settings.parse({key: value}, ranks)
        except ValueError as error:
            found.add(ERROR, place, str(error).removeprefix(f"{names.CONNECTOR}: "))
    if len(found.findings) > before:
        return
    found.per_rank = Settings.parse(dict(extra), ranks).cpu_bytes_per_rank
    place = f"{where}.{EXTRA}"
    if PER_RANK in extra and TOTAL in extra:
        found.add(WARNING, place, f"both {PER_RANK} and {TOTAL} are set; {PER_RANK} wins, take the other one out")
    elif PER_RANK not in extra:
        total = extra.get(TOTAL, DEFAULT_TOTAL_BYTES)
        source = f"{TOTAL} {total}" if TOTAL in extra else f"no budget is set: the default of {total} bytes in all"
        d = deployment
        found.add(
            NOTE,
            place,
            f"{source} / {ranks} ranks (tp {d.tp} x pp {d.pp} x dp {d.dp}) = {found.per_rank} bytes per rank; "
            f"{PER_RANK} says so directly",
        )
    if extra.get(VERIFY):
        found.add(NOTE, f"{place}.{VERIFY}", "is for debugging: every block is read again for its checksum")
    if extra.get(SHARE_PREFIXES):
        found.add(NOTE, f"{place}.{SHARE_PREFIXES}", "is experimental, and off by default")


def lint_additional(config: Any) -> tuple[bool | None, list[Finding]]:
    """Check what vLLM's `--additional-config` says of the recompute scheduler.

    Returns:
        (the flag `recompute_scheduler_enable`, None where it is not certain; what was found).
    """
    if not isinstance(config, Mapping):
        return None, [Finding(ERROR, ADDITIONAL, f"this is {_kind(config)}; write an object, {{...}}")]
    findings: list[Finding] = []
    section = config.get(names.SECTION)
    places = [(ADDITIONAL, config)]
    if isinstance(section, Mapping):
        places.append((f"{ADDITIONAL}.{names.SECTION}", section))
    ours = (names.FLAG, names.FALLBACK, names.MAX_LOCAL_TOKENS)
    unsettled: set[str] = set()
    for where, place in places:
        for key in place:
            if key not in ours and (close := difflib.get_close_matches(key, ours, n=1, cutoff=0.85)):
                unsettled.add(close[0])
                findings.append(Finding(ERROR, f"{where}.{key}", f"nobody reads this; did you mean {close[0]!r}?"))
    values: dict[str, Any] = {}
    for key in ours:
        found = [place[key] for _, place in places if key in place]
        if len(found) == 2 and found[0] != found[1]:
            unsettled.add(key)
            message = f"is {found[0]!r}, but {names.SECTION}.{key} is {found[1]!r}; keep one of them"
            findings.append(Finding(ERROR, f"{ADDITIONAL}.{key}", message))
        if found:
            values[key] = found[0]
    flag = values.get(names.FLAG, False)
    if not isinstance(flag, bool):
        unsettled.add(names.FLAG)
        findings.append(Finding(ERROR, f"{ADDITIONAL}.{names.FLAG}", f"is {flag!r}; write true or false"))
    findings += _lint_fallback(values)
    return (None if names.FLAG in unsettled else flag), findings


def _lint_fallback(values: Mapping[str, Any]) -> Iterable[Finding]:
    kind = values.get(names.FALLBACK, "local")
    if kind not in names.FALLBACKS:
        yield Finding(ERROR, f"{ADDITIONAL}.{names.FALLBACK}", f'is {kind!r}; write "local" or "resend"')
    limit = values.get(names.MAX_LOCAL_TOKENS, 0)
    where = f"{ADDITIONAL}.{names.MAX_LOCAL_TOKENS}"
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        yield Finding(ERROR, where, f"is {limit!r}; write a number of tokens, 0 or more")
    elif limit and kind == "local":
        yield Finding(ERROR, where, f'counts only with "{names.FALLBACK}": "resend"; add that, or take it out')


def lint_together(transfer: Transfer | None, flag: bool | None) -> list[Finding]:
    """Check the two options against each other.

    Args:
        transfer: what `lint_transfer` found; None where there is no kv-transfer-config at all.
        flag: from `lint_additional`; None where it is not certain, and nothing more can be said.
    """
    where = f"{ADDITIONAL}.{names.FLAG}"
    role = transfer.role if transfer else None
    if flag is None:
        return []
    if flag and transfer is None:
        return [Finding(ERROR, where, f"works only on a Decode node: {TRANSFER} with kv_role {ROLE!r} is missing")]
    if flag and role == "kv_producer":
        return [Finding(WARNING, where, "is ignored on a Prefill node (kv_role is 'kv_producer'); take it out")]
    if flag and role == "kv_both":
        return [Finding(ERROR, where, f"is refused where kv_role is 'kv_both'; set {ROLE!r}, or take the flag out")]
    if flag and transfer and not transfer.has_offload and role == ROLE:
        return [Finding(WARNING, TRANSFER, f"{names.CONNECTOR} is missing: preempted requests are recomputed")]
    if not flag and transfer and transfer.has_offload:
        text = f"nothing is ever kept without it; write {ADDITIONAL} '{{\"{names.FLAG}\": true}}'"
        return [Finding(ERROR, where, text)]
    return []


def _extra(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = entry.get(EXTRA, {})
    return extra if isinstance(extra, Mapping) else {}


def _meant(key: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(key, known, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else type(value).__name__)
