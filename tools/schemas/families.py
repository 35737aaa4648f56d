"""Schemas in families: what Kubernetes, workflows, web APIs, events and functions of agents ask for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tools.schemas.fields import (
    FORMATS,
    WORDS,
    Schema,
    amount,
    flag,
    mapping,
    name,
    nullable,
    of_format,
    one_of,
    record,
    ref,
    several,
    some_field,
    some_record,
    text,
    whole,
)


def kubernetes(chance: random.Random) -> Schema:
    spec = _pod_spec()
    kept = {word: spec[word] for word in spec if word in ("containers", "replicas") or chance.random() < 0.7}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Deployment",
        **record(
            {
                "apiVersion": {"const": chance.choice(("apps/v1", "v1", "batch/v1"))},
                "kind": one_of("Deployment", "StatefulSet", "Job"),
                "metadata": record(
                    {"name": name(), "namespace": name(), "labels": mapping(name()), "annotations": mapping(text())},
                    "name",
                ),
                "spec": record(kept, "containers"),
            },
            "apiVersion",
            "kind",
            "metadata",
            "spec",
        ),
        "$defs": {"container": _container(), **_parts_of_a_container()},
    }


def _pod_spec() -> dict[str, Schema]:
    return {
        "replicas": {**whole(0, 50), "format": "int32"},
        "selector": record({"matchLabels": mapping(name(), 2)}, "matchLabels"),
        "containers": several(ref("container"), 1, 2),
        "restartPolicy": one_of("Always", "OnFailure", "Never"),
        "nodeSelector": mapping(name(), 2),
        "hostNetwork": flag(default=False),
        "terminationGracePeriodSeconds": nullable(whole(0, 600)),
        "tolerations": several(
            record({"key": name(), "operator": one_of("Exists", "Equal"), "effect": one_of("NoSchedule", "NoExecute")})
        ),
    }


def _container() -> Schema:
    quantity = {"type": "string", "pattern": r"^[0-9]{1,4}(m|Mi|Gi|k)?$"}
    source = {
        "anyOf": [
            record({"value": text()}, "value"),
            record({"valueFrom": record({"key": name(), "name": name()}, "key")}, "valueFrom"),
        ]
    }
    return record(
        {
            "name": name("Unique within the pod."),
            "image": {"type": "string", "pattern": r"^[a-z0-9./-]{1,30}:[a-z0-9.]{1,10}$"},
            "ports": several(ref("port")),
            "env": several(source),
            "resources": record({"limits": mapping(quantity, 2, "^(cpu|memory)$"), "requests": mapping(quantity, 2)}),
            "livenessProbe": ref("probe"),
            "imagePullPolicy": one_of("Always", "IfNotPresent", "Never"),
        },
        "name",
        "image",
    )


def _parts_of_a_container() -> dict[str, Schema]:
    port = record(
        {"name": name(), "containerPort": whole(1, 65535), "protocol": one_of("TCP", "UDP", "SCTP")}, "containerPort"
    )
    path = {"type": "string", "pattern": "^/[a-z]{0,10}$"}
    probe = record({"path": path, "port": whole(1, 65535), "periodSeconds": whole(1, 60)}, "port")
    variable = {
        "allOf": [
            {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[A-Z_]{1,12}$"}},
                "required": ["name"],
            }
        ]
    }
    return {"port": port, "probe": probe, "variable": variable}


def workflow(chance: random.Random) -> Schema:
    step = {
        "oneOf": [
            record(
                {"uses": {"type": "string", "pattern": r"^[a-z]{1,10}/[a-z]{1,10}@v\d$"}, "with": mapping(text())},
                "uses",
            ),
            record(
                {"run": text(40), "shell": one_of("bash", "sh", "pwsh"), "env": mapping(text(), 2, "^[A-Z_]{1,8}$")},
                "run",
            ),
        ]
    }
    job = record(
        {
            "runs-on": {"anyOf": [one_of("ubuntu-latest", "macos-14", "windows-2022"), several(name(), 1, 2)]},
            "needs": {"anyOf": [name(), several(name(), 1, 2)]},
            "steps": several(ref("step"), 1, chance.randint(1, 3)),
            "timeout-minutes": whole(1, 360),
            "strategy": record({"matrix": mapping(several(text(8), 1, 3), 2), "fail-fast": flag()}),
            "if": text(20),
        },
        "runs-on",
        "steps",
    )
    trigger = {
        "push": record({"branches": several(name(), 1, 2)}),
        "schedule": several(record({"cron": text(12)}, "cron")),
        "workflow_dispatch": {"type": "null"},
    }
    kept = {word: trigger[word] for word in trigger if word == "push" or chance.random() < 0.6}
    return {
        **record(
            {"name": text(), "on": record(kept, "push"), "jobs": mapping(ref("job"), 2, "^[a-z]{1,10}$")},
            "name",
            "on",
            "jobs",
        ),
        "$defs": {"step": step, "job": job},
    }


def api(chance: random.Random) -> Schema:
    item = some_record(chance, chance.randint(3, 9), chance.randint(0, 2))
    error = record(
        {
            "code": whole(400, 599),
            "message": text(40),
            "details": several(record({"field": name(), "issue": text()}, "field")),
        },
        "code",
        "message",
    )
    page = record({"next": nullable(of_format("uri")), "total": whole(0, 10**6), "size": one_of(10, 25, 50)}, "total")
    return {
        "anyOf": [
            record({"ok": {"const": True}, "data": several(ref("item"), 0, 2), "page": ref("page")}, "ok", "data"),
            record({"ok": {"const": False}, "error": ref("error")}, "ok", "error"),
        ],
        "$defs": {"item": item, "error": error, "page": page},
    }


def function(chance: random.Random) -> Schema:
    words = chance.sample(WORDS, chance.randint(1, 7))
    properties = {word: {"description": f"Which {word} to use.", **some_field(chance)} for word in words}
    return record(properties, *words[: chance.randint(1, len(words))], closed=True, title=f"{words[0]}_tool")


def event(chance: random.Random) -> Schema:
    context = some_record(chance, chance.randint(2, 5), 1)
    payloads = {
        kind: some_record(chance, chance.randint(2, 6), chance.randint(0, 1)) for kind in ("click", "view", "purchase")
    }
    cases = [
        record({"event": {"const": kind}, "payload": payload, "context": ref("context")}, "event", "payload")
        for kind, payload in payloads.items()
    ]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "self": {"vendor": "com.example", "name": "event", "format": "jsonschema", "version": "1-0-0"},
        "oneOf": cases,
        "$defs": {"context": context},
    }


def geo(chance: random.Random) -> Schema:
    position = {
        "type": "array",
        "prefixItems": [
            {"type": "number", "minimum": -180, "maximum": 180, "multipleOf": 0.001},
            {"type": "number", "minimum": -90, "maximum": 90, "multipleOf": 0.001},
        ],
        "items": False,
        "minItems": 2,
    }
    ring = several(ref("position"), 4, 5)
    shapes = {"Point": ref("position"), "LineString": several(ref("position"), 2, 3), "Polygon": several(ring, 1, 1)}
    cases = [
        record({"type": {"const": kind}, "coordinates": shape}, "type", "coordinates") for kind, shape in shapes.items()
    ]
    feature = record(
        {"type": {"const": "Feature"}, "geometry": {"oneOf": cases}, "properties": mapping(some_field(chance), 2)},
        "type",
        "geometry",
        "properties",
    )
    return {
        **record(
            {
                "type": {"const": "FeatureCollection"},
                "features": several(ref("feature"), 0, chance.randint(1, 2)),
                "bbox": several(amount(180, None), 4, 4),
            },
            "type",
            "features",
        ),
        "$defs": {"position": position, "feature": feature},
    }


def invoice(chance: random.Random) -> Schema:
    base = record(
        {
            "id": of_format("uuid"),
            "issued": of_format("date"),
            "due": of_format("date"),
            "currency": one_of("EUR", "USD"),
            "customer": record(
                {
                    "name": text(30, minLength=1),
                    "email": of_format("email"),
                    "billing": ref("address"),
                    "shipping": ref("address"),
                },
                "name",
                "billing",
            ),
            "lines": several(ref("line"), 1, chance.randint(1, 4)),
            "total": {"type": "number", "exclusiveMinimum": 0, "maximum": 99999.99, "multipleOf": 0.01},
            "notes": nullable(text(60)),
        },
        "id",
        "issued",
        "currency",
        "customer",
        "lines",
        "total",
    )
    return {**base, "$defs": _parts_of_an_invoice()}


def _parts_of_an_invoice() -> dict[str, Schema]:
    line = record(
        {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "quantity": whole(1, 99),
            "price": amount(),
            "tax": one_of(0, 7, 19),
        },
        "sku",
        "quantity",
        "price",
    )
    address = record(
        {
            "street": text(30),
            "city": text(20),
            "zip": {"type": "string", "pattern": r"^\d{5}$"},
            "country": one_of("DE", "FR", "US"),
        },
        "street",
        "city",
        "country",
    )
    return {"line": line, "address": address}


def tree(chance: random.Random) -> Schema:
    leaf = {"anyOf": [whole(), {"type": "string", "maxLength": 8}, {"type": "null"}]}
    binary = record(
        {"op": one_of("+", "-", "*", "/"), "left": ref("node"), "right": ref("node")}, "op", "left", "right"
    )
    folder = record({"name": name(), "size": whole(), "children": several(ref("node"), 0, 2)}, "name")
    linked = record({"value": leaf, "next": {"anyOf": [ref("node"), {"type": "null"}]}}, "value", "next")
    node = chance.choice(({"anyOf": [leaf, binary]}, folder, linked, {"anyOf": [leaf, folder]}))
    if chance.random() < 0.3:
        return {**folder, "properties": {**folder["properties"], "children": several({"$ref": "#"}, 0, 2)}}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def config(chance: random.Random) -> Schema:
    shared = some_record(chance, chance.randint(3, 6), 0)
    sections = {
        word: some_record(chance, chance.randint(3, 8), chance.randint(0, 2))
        for word in chance.sample(WORDS, chance.randint(1, 4))
    }
    extended = {
        "allOf": [
            {"type": "object", "properties": {"extends": name()}},
            {**shared, "additionalProperties": True, "maxProperties": 8, "properties": {**shared["properties"]}},
        ]
    }
    extended["allOf"][1].pop("additionalProperties")
    extended["allOf"][1].pop("maxProperties")
    extended["allOf"].append(
        {
            "type": "object",
            "additionalProperties": {
                "type": ["string", "number", "boolean", "array", "object", "null"],
                "maxLength": 9,
            },
        }
    )
    rules = mapping({"anyOf": [one_of("off", "warn", "error"), whole(0, 2)]}, 4, "^[a-z]{2,10}$")
    return {
        "definitions": {"shared": shared},
        **record({**sections, "rules": rules, "base": {"$ref": "#/definitions/shared"}}, "rules"),
    }


def union(chance: random.Random) -> Schema:
    """As pydantic writes discriminated unions."""
    kinds = chance.sample(WORDS, chance.randint(2, 6))
    models = {
        kind.title(): record(
            {"kind": {"const": kind, "title": "Kind", "type": "string"}, **some_record(chance, 3, 1)["properties"]},
            "kind",
            title=kind.title(),
        )
        for kind in kinds
    }
    mapped = {kind: f"#/$defs/{kind.title()}" for kind in kinds}
    cases = [{"$ref": target} for target in mapped.values()]
    return {
        "$defs": models,
        **record(
            {
                "item": {"discriminator": {"mapping": mapped, "propertyName": "kind"}, "oneOf": cases},
                "tags": several(text(8), 0, 2),
            },
            "item",
            title="Model",
        ),
    }


def formats(chance: random.Random) -> Schema:
    kinds = chance.sample(FORMATS, 5)
    return record(
        {kind.replace("-", "_"): of_format(kind) for kind in kinds}, *(kind.replace("-", "_") for kind in kinds)
    )


FAMILIES: dict[Callable[[random.Random], Schema], int] = {
    kubernetes: 18,
    workflow: 15,
    api: 25,
    function: 30,
    event: 15,
    geo: 8,
    invoice: 10,
    tree: 14,
    config: 20,
    union: 20,
    formats: 7,
}


def built() -> Iterator[tuple[str, Schema]]:
    """All of them, by name; the same every time."""
    for family, count in FAMILIES.items():
        for number in range(count):
            told = f"{family.__name__}-{number}"
            yield told, family(random.Random(told))
