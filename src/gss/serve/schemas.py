"""The schemas of requests and responses, from which the OpenAPI description is made."""

from typing import Annotated, Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from gss.sampling import OPTIONS, Sampling

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
# Stop at the first bad item: an error for each of a million, in every branch of a union, would take a minute.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]
INT64 = 2**63
NEXT_TURN = ("\n\nUser:", "\nUser:")
"""Where an answer in a chat ends: before the next turn and its empty line, which the client would send back."""


class Request(BaseModel):
    # Strict: values of other types are not converted, and unknown fields are errors.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, values: Any) -> Any:
        """Keep only one of the unknown fields, which is enough to refuse the request: each would be an error."""
        if not isinstance(values, dict):
            return values
        unknown = [name for name in values if name not in cls.model_fields]
        return {name: values[name] for name in (*cls.model_fields, *unknown[:1]) if name in values}


class StreamOptions(Request):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the token counts in a separate chunk at the end.")


class Generation(Request):
    """The parameters of every kind of completion, besides the sampler's options."""

    model: str | None = Field(None, description="The served model's id; optional.")
    n: int | None = Field(1, ge=1, lt=2**31, description="Number of continuations per prompt, or of chat answers.")
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="The same seed gives the same text.")
    stop: str | Texts | None = Field(None, description="End before any of these; in a chat, also before the next turn.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Not supported: 0 only.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Not supported: 0 only.")
    logit_bias: dict[str, float] | None = Field(None, description="Not supported.")


_OPTIONS: dict[str, Any] = {
    name: (Optional[option.type], Field(option.default, description=about["about"], **about["served"]))  # noqa: UP045
    for name, option in OPTIONS.items()
    for about in [option.metadata]
}
SamplingRequest: Any = create_model("SamplingRequest", __base__=Generation, **_OPTIONS)


class CompletionRequest(SamplingRequest):
    """OpenAI's completions, with the sampler's additional options."""

    prompt: str | Texts | TokenIds | ManyTokenIds = Field("", description="Texts, or token ids, read exactly as given.")
    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="Maximum number of tokens; 16 by default. 0 needs echo."
    )
    best_of: int | None = Field(None, ge=1, lt=2**31, description="Accepted only if it equals n.")
    echo: bool | None = Field(False, description="Return the prompt before the continuation.")
    logprobs: int | None = Field(None, ge=0, lt=2**31, description="Score tokens, with this many alternatives.")
    ignore_eos: bool | None = Field(False, description="Continue past the end of the document.")
    suffix: str | None = Field(None, description="Not supported.")

    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(**{name: value for name in OPTIONS if (value := getattr(self, name)) is not None})


class Message(Request):
    """A turn of a dialogue."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class TextPart(Request):
    """Text as one of the parts of a turn."""

    type: Literal["text"]
    text: str


class Turn(Message):
    """A turn as clients send it: a text, or parts, which are concatenated."""

    # Parts first: what is wrong with one of them is then the first of the errors.
    content: Annotated[list[TextPart], Field(max_length=4096, fail_fast=True)] | str  # type: ignore[assignment]

    def line(self) -> str:
        """The turn in the plain text of a dialogue."""
        said = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        name = {"user": "User: ", "assistant": "Assistant: "}.get(self.role, "")
        return name + said


class ChatRequest(SamplingRequest):
    """OpenAI's chat completions, for clients that support nothing else.

    The models only continue text; they are not trained to follow instructions.
    """

    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Maximum number of tokens; 256 by default.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="Another name for max_tokens.")

    def completion(self) -> CompletionRequest:
        """The request to continue the dialogue as plain text, up to the next speaker."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = self.model_dump(exclude={"messages", "max_tokens", "max_completion_tokens", "stop", "stream_options"})
        return CompletionRequest(
            **given,
            prompt="\n\n".join([*(turn.line() for turn in self.messages), "Assistant:"]),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=[*NEXT_TURN, *stop],
            stream_options=self.stream_options,
        )


class TokenizeRequest(Request):
    """A text to tokenize."""

    prompt: str
    model: str | None = None


class DetokenizeRequest(Request):
    """Tokens to turn into text."""

    tokens: TokenIds
    model: str | None = None


def _answer(name: str, about: str, **fields: Any) -> Any:
    """A response for the OpenAPI description: its fields, all required, and their types."""
    required = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, __doc__=about, **required)  # type: ignore[call-overload]


_many: Any = list.__class_getitem__  # list[…] of a model that is made here, which type checkers do not know
Ending = Literal["stop", "length"] | None
Usage = _answer("Usage", "Token counts.", prompt_tokens=int, completion_tokens=int, total_tokens=int)
Logprobs = _answer(
    "Logprobs",
    "Scores of tokens; each list has one item per token.",
    tokens=list[str],
    token_logprobs=list[float | None],
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[int],
    token_ids=list[int],
)
Choice = _answer("Choice", "A continuation.", index=int, text=str, logprobs=Logprobs | None, finish_reason=Ending)
ChatChoice = _answer("ChatChoice", "An answer; streamed, a `delta`.", index=int, message=Message, finish_reason=Ending)
_HEAD: dict[str, Any] = {"id": str, "created": int, "model": str, "usage": Usage}
Completion = _answer("Completion", "Continuations.", object=Literal["text_completion"], choices=_many(Choice), **_HEAD)
ChatCompletion = _answer(
    "ChatCompletion", "Answers of a chat.", object=Literal["chat.completion"], choices=_many(ChatChoice), **_HEAD
)
ModelCard = _answer("ModelCard", "The model.", id=str, object=Literal["model"], created=int, owned_by=str)
ModelList = _answer("ModelList", "All models.", object=Literal["list"], data=_many(ModelCard))
Tokens = _answer("Tokens", "The tokens of a text.", tokens=list[int], pieces=list[str], count=int)
Text = _answer("Text", "The text of tokens.", prompt=str)
Health = _answer("Health", "Whether the server works.", status=Literal["ok", "stopped"])
Wrong = _answer("ErrorDetail", "What is wrong.", message=str, type=str, param=str | None, code=str | None)
Error = _answer("Error", "The body of every error response.", error=Wrong)

_STATUSES = {
    400: "A parameter is wrong or exceeds a limit; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Addressed to another host.",
    404: "No such model.",
    408: "The request took too long.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full: try again later.",
    503: "The server is about to stop, or has too many large bodies in progress.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": about} for status, about in _STATUSES.items()
}
