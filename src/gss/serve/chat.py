"""`/v1/chat/completions`: messages written out as a plain dialogue, which the model continues as it would any text.

The models are not trained to follow instructions; what the interface is for is clients that speak no other.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gss.serve.completions import ActiveCompletion
from gss.serve.schemas import INT64, Completion, CompletionRequest, Request, SamplingRequest, StreamOptions, Texts

_DEFAULT_TOKENS = 256


class Message(Request):
    """A turn of a dialogue."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatRequest(SamplingRequest):
    """OpenAI's chat completions, as far as a model that continues texts can answer them."""

    model: str | None = Field(None, description="The served model's id; may be left out.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description=f"Most tokens to produce; {_DEFAULT_TOKENS}.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="Another name of max_tokens.")
    n: int | None = Field(1, ge=1, lt=2**31, description="Answers.")
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="The same seed gives the same text.")
    stop: str | Texts | None = Field(None, description="End before any of these, besides the next turn.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored.")

    def completion(self) -> CompletionRequest:
        """The request to continue the dialogue, up to where somebody else would speak."""
        names = {"user": "User", "assistant": "Assistant"}
        turns = [f"{names[m.role]}: {m.content}" if m.role in names else m.content for m in self.messages]
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = self.model_dump(exclude={"messages", "max_tokens", "max_completion_tokens", "stop", "stream_options"})
        return CompletionRequest(
            **given,
            prompt="\n\n".join([*turns, "Assistant:"]),
            max_tokens=self.max_completion_tokens or self.max_tokens or _DEFAULT_TOKENS,
            stop=["\nUser:", *stop],
            stream_options=self.stream_options,
        )


class ChatChoice(BaseModel):
    """One answer; in a chunk of a stream what is new is its `delta`."""

    index: int
    message: Message
    finish_reason: Literal["stop", "length"] | None


class ChatCompletion(Completion):
    """The answer."""

    object: Literal["chat.completion"]  # type: ignore[assignment]
    choices: list[ChatChoice]  # type: ignore[assignment]


class ActiveChat(ActiveCompletion):
    """A request for a chat completion, from its arrival to its end."""

    kind, prefix = "chat.completion", "chatcmpl"

    def _shown(self, choice: dict[str, Any], whole: bool) -> dict[str, Any]:
        said = {"role": "assistant", "content": choice["text"].lstrip() if whole else choice["text"]}
        part = {"message" if whole else "delta": said}
        return {"index": choice["index"], **part, "logprobs": None, "finish_reason": choice["finish_reason"]}
