from openengine.v1 import error_pb2 as _error_pb2
from openengine.v1 import generation_pb2 as _generation_pb2
from openengine.v1 import model_pb2 as _model_pb2
from openengine.v1 import server_pb2 as _server_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_CONTEXT: _ClassVar[Phase]
    PHASE_GENERATION: _ClassVar[Phase]
    PHASE_AGGREGATED: _ClassVar[Phase]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_TOOL_CALL: _ClassVar[StopReason]
    STOP_REASON_END_OF_TURN: _ClassVar[StopReason]
    STOP_REASON_LENGTH: _ClassVar[StopReason]

class Medium(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIUM_UNSPECIFIED: _ClassVar[Medium]
    MEDIUM_DEVICE: _ClassVar[Medium]
    MEDIUM_HOST: _ClassVar[Medium]
    MEDIUM_DISK: _ClassVar[Medium]
PHASE_UNSPECIFIED: Phase
PHASE_CONTEXT: Phase
PHASE_GENERATION: Phase
PHASE_AGGREGATED: Phase
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_TOOL_CALL: StopReason
STOP_REASON_END_OF_TURN: StopReason
STOP_REASON_LENGTH: StopReason
MEDIUM_UNSPECIFIED: Medium
MEDIUM_DEVICE: Medium
MEDIUM_HOST: Medium
MEDIUM_DISK: Medium

class EdgeMessage(_message.Message):
    __slots__ = ("hello", "submits", "cancels", "updates", "kv_subscribe")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    KV_SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedCompositeFieldContainer[Cancel]
    updates: _containers.RepeatedCompositeFieldContainer[ConversationUpdate]
    kv_subscribe: KvSubscribe
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[Cancel, _Mapping]]] = ..., updates: _Optional[_Iterable[_Union[ConversationUpdate, _Mapping]]] = ..., kv_subscribe: _Optional[_Union[KvSubscribe, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("revision", "edge_id", "envelope")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EDGE_ID_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    revision: int
    edge_id: str
    envelope: str
    def __init__(self, revision: _Optional[int] = ..., edge_id: _Optional[str] = ..., envelope: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "model", "phase", "token_ids", "sampling", "stopping", "response", "kv_session", "cache_salt", "bypass_prefix_cache", "conversation_id", "lineage", "tenant_tag", "traceparent", "tracestate", "resumed_tokens", "retention")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    KV_SESSION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TENANT_TAG_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    model: str
    phase: Phase
    token_ids: bytes
    sampling: _generation_pb2.SamplingParams
    stopping: _generation_pb2.StoppingOptions
    response: _generation_pb2.ResponseOptions
    kv_session: bytes
    cache_salt: bytes
    bypass_prefix_cache: bool
    conversation_id: str
    lineage: str
    tenant_tag: bytes
    traceparent: str
    tracestate: str
    resumed_tokens: int
    retention: Retention
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.StoppingOptions, _Mapping]] = ..., response: _Optional[_Union[_generation_pb2.ResponseOptions, _Mapping]] = ..., kv_session: _Optional[bytes] = ..., cache_salt: _Optional[bytes] = ..., bypass_prefix_cache: _Optional[bool] = ..., conversation_id: _Optional[str] = ..., lineage: _Optional[str] = ..., tenant_tag: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., resumed_tokens: _Optional[int] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("ranges", "decode_priority", "decode_duration_ms")
    class TokenRange(_message.Message):
        __slots__ = ("start", "stop", "priority", "duration_ms")
        START_FIELD_NUMBER: _ClassVar[int]
        STOP_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        DURATION_MS_FIELD_NUMBER: _ClassVar[int]
        start: int
        stop: int
        priority: int
        duration_ms: int
        def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., priority: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DECODE_DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[Retention.TokenRange]
    decode_priority: int
    decode_duration_ms: int
    def __init__(self, ranges: _Optional[_Iterable[_Union[Retention.TokenRange, _Mapping]]] = ..., decode_priority: _Optional[int] = ..., decode_duration_ms: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class ConversationUpdate(_message.Message):
    __slots__ = ("conversation_id", "generating", "ended", "closed", "returned")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    generating: Generating
    ended: Ended
    closed: Closed
    returned: Returned
    def __init__(self, conversation_id: _Optional[str] = ..., generating: _Optional[_Union[Generating, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., returned: _Optional[_Union[Returned, _Mapping]] = ...) -> None: ...

class Generating(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ended(_message.Message):
    __slots__ = ("reason", "final")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    reason: StopReason
    final: bool
    def __init__(self, reason: _Optional[_Union[StopReason, str]] = ..., final: _Optional[bool] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Returned(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: str
    def __init__(self, envelope: _Optional[str] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("welcome", "step", "kv_events")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: Step
    kv_events: KvEvents
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class KvSubscribe(_message.Message):
    __slots__ = ("epoch", "after_sequence", "snapshot")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    after_sequence: int
    snapshot: bool
    def __init__(self, epoch: _Optional[str] = ..., after_sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("epoch", "sequence", "snapshot", "snapshot_begin", "snapshot_end", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    snapshot: bool
    snapshot_begin: bool
    snapshot_end: bool
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., snapshot_begin: _Optional[bool] = ..., snapshot_end: _Optional[bool] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "updated", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: KvStored
    removed: KvRemoved
    updated: KvUpdated
    cleared: KvCleared
    def __init__(self, stored: _Optional[_Union[KvStored, _Mapping]] = ..., removed: _Optional[_Union[KvRemoved, _Mapping]] = ..., updated: _Optional[_Union[KvUpdated, _Mapping]] = ..., cleared: _Optional[_Union[KvCleared, _Mapping]] = ...) -> None: ...

class KvStored(_message.Message):
    __slots__ = ("parent", "keys", "medium", "begins")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    keys: bytes
    medium: Medium
    begins: bool
    def __init__(self, parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., medium: _Optional[_Union[Medium, str]] = ..., begins: _Optional[bool] = ...) -> None: ...

class KvRemoved(_message.Message):
    __slots__ = ("keys", "medium")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    medium: Medium
    def __init__(self, keys: _Optional[bytes] = ..., medium: _Optional[_Union[Medium, str]] = ...) -> None: ...

class KvUpdated(_message.Message):
    __slots__ = ("first", "last", "count", "old_priority", "new_priority")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OLD_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NEW_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    first: bytes
    last: bytes
    count: int
    old_priority: int
    new_priority: int
    def __init__(self, first: _Optional[bytes] = ..., last: _Optional[bytes] = ..., count: _Optional[int] = ..., old_priority: _Optional[int] = ..., new_priority: _Optional[int] = ...) -> None: ...

class KvCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("server", "model", "load")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    server: _server_pb2.ServerInfo
    model: _model_pb2.ModelInfo
    load: Load
    def __init__(self, server: _Optional[_Union[_server_pb2.ServerInfo, _Mapping]] = ..., model: _Optional[_Union[_model_pb2.ModelInfo, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("number", "handles", "token_ids", "events", "load")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    handles: bytes
    token_ids: bytes
    events: _containers.RepeatedCompositeFieldContainer[Event]
    load: Load
    def __init__(self, number: _Optional[int] = ..., handles: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("handle", "started", "token", "prefill_ready", "kv_arrived", "finished", "error", "lineage_refused")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_READY_FIELD_NUMBER: _ClassVar[int]
    KV_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    started: Started
    token: _generation_pb2.TokenInfo
    prefill_ready: PrefillReady
    kv_arrived: KvArrived
    finished: Finished
    error: _error_pb2.EngineError
    lineage_refused: bool
    def __init__(self, handle: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., token: _Optional[_Union[_generation_pb2.TokenInfo, _Mapping]] = ..., prefill_ready: _Optional[_Union[PrefillReady, _Mapping]] = ..., kv_arrived: _Optional[_Union[KvArrived, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.EngineError, _Mapping]] = ..., lineage_refused: _Optional[bool] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("cached_prompt_tokens",)
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_prompt_tokens: int
    def __init__(self, cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class PrefillReady(_message.Message):
    __slots__ = ("kv_session", "first_token", "usage")
    KV_SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    kv_session: bytes
    first_token: _generation_pb2.TokenInfo
    usage: _generation_pb2.Usage
    def __init__(self, kv_session: _Optional[bytes] = ..., first_token: _Optional[_Union[_generation_pb2.TokenInfo, _Mapping]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class KvArrived(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_match", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    stop_match: _generation_pb2.StopMatch
    usage: _generation_pb2.Usage
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_match: _Optional[_Union[_generation_pb2.StopMatch, _Mapping]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "queued_requests", "queued_tokens", "used_pages", "total_pages", "draining")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    queued_requests: int
    queued_tokens: int
    used_pages: int
    total_pages: int
    draining: bool
    def __init__(self, running_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., used_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...
