"""What four agents send with a root's request, its child's and its grandchild's, as raw header lists."""

from __future__ import annotations

from typing import TypeAlias

Headers: TypeAlias = list[tuple[str, str]]

COMMON: Headers = [
    ("Host", "127.0.0.1:8000"),
    ("Accept", "application/json"),
    ("Content-Type", "application/json"),
    ("Authorization", "Bearer kr-key"),
    ("X-Forwarded-For", "10.0.0.1"),
    ("X-Forwarded-For", "10.0.0.2"),
]

CLAUDE_SESSION = "0b6f7c1e-2f8e-4f5d-9a3b-6d1f0c9e8a77"
CLAUDE_CODE: dict[str, Headers] = {
    "root": [*COMMON, ("User-Agent", "claude-cli/2.1"), ("X-Claude-Code-Session-Id", CLAUDE_SESSION)],
    "child": [
        *COMMON,
        ("User-Agent", "claude-cli/2.1"),
        ("X-Claude-Code-Session-Id", CLAUDE_SESSION),
        ("X-Claude-Code-Agent-Id", "explore-1"),
    ],
    "grandchild": [
        *COMMON,
        ("User-Agent", "claude-cli/2.1"),
        ("X-Claude-Code-Session-Id", CLAUDE_SESSION),
        ("X-Claude-Code-Agent-Id", "grep-7"),
        ("X-Claude-Code-Parent-Agent-Id", "explore-1"),
    ],
}

CODEX: dict[str, Headers] = {
    "root": [*COMMON, ("Originator", "codex_cli_rs"), ("Session-Id", "s-1"), ("Thread-Id", "t-1")],
    "child": [
        *COMMON,
        ("Originator", "codex_cli_rs"),
        ("Session_Id", "s-1"),
        ("Thread_Id", "t-2"),
        ("X-Codex-Parent-Thread-Id", "t-1"),
        ("X-OpenAI-Subagent", "collab_spawn"),
    ],
    "grandchild": [
        *COMMON,
        ("Originator", "codex_cli_rs"),
        ("session-id", "s-1"),
        ("thread-id", "t-3"),
        ("x-codex-parent-thread-id", "t-2"),
        ("x-openai-subagent", "collab_spawn"),
    ],
}

OPENCODE: dict[str, Headers] = {
    "root": [*COMMON, ("x-opencode-session", "ses_1"), ("x-session-affinity", "ses_1")],
    "child": [*COMMON, ("x-session-id", "ses_2"), ("x-session-affinity", "ses_2"), ("x-parent-session-id", "ses_1")],
    "grandchild": [*COMMON, ("x-opencode-session", "ses_3"), ("x-parent-session-id", "ses_2")],
}

DYNAMO: dict[str, Headers] = {
    "root": [*COMMON, ("X-Dynamo-Session-ID", "d1")],
    "child": [*COMMON, ("X-Dynamo-Session-ID", "d2"), ("X-Dynamo-Parent-Session-ID", "d1")],
    "grandchild": [
        *COMMON,
        ("X-Dynamo-Session-ID", "d3"),
        ("X-Dynamo-Parent-Session-ID", "d2"),
        ("X-Dynamo-Session-Final", "true"),
    ],
}

AGENTS = {"claude-code": CLAUDE_CODE, "codex": CODEX, "opencode": OPENCODE, "dynamo": DYNAMO}

SIDE: dict[str, tuple[str, Headers]] = {
    "claude-code title": ("claude-code", CLAUDE_CODE["root"]),
    "codex compaction": (
        "codex",
        [
            *COMMON,
            ("Originator", "codex_cli_rs"),
            ("session_id", "s-1"),
            ("thread_id", "t-8"),
            ("x-codex-parent-thread-id", "t-1"),
            ("x-openai-subagent", "compact"),
        ],
    ),
    "codex review of a child's work": (
        "codex",
        [
            *COMMON,
            ("Originator", "codex_cli_rs"),
            ("session_id", "s-1"),
            ("thread_id", "t-9"),
            ("x-codex-parent-thread-id", "t-2"),
            ("x-openai-subagent", "review"),
        ],
    ),
    "opencode title": ("opencode", OPENCODE["root"]),
}
"""Calls beside a conversation: under its own id, or as a task that is nobody's child."""
