"""The official client package, unmodified, against `kvik up`."""

import hashlib
from collections.abc import Iterator

import openai
import pytest
from conftest import running

MODEL = "kvik-tiny"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]
KEY = "a-key-for-tests"


@pytest.fixture(scope="session")
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def guarded_gateway() -> Iterator[str]:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    with running("--workers", "1", "--set", f"api_keys=[{{name: test, sha256: {digest}}}]") as address:
        yield address


def complete(client: openai.OpenAI, **options):
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0} | options)


def chat(client: openai.OpenAI, **options):
    defaults = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    return client.chat.completions.create(**defaults | options)


def test_models_lists_the_bundled_model(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_completion_has_text_reason_and_usage(client):
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].text.strip()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_streamed_completion_joins_to_the_whole_one(client):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    whole = complete(client)
    assert 1 < len(chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_answer_comes_from_the_assistant(client):
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 24


def test_a_streamed_chat_joins_to_the_whole_one(client):
    chunks = list(chat(client, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = chat(client).choices[0]
    assert text == whole.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_ends_before_its_stop_text(client, stream):
    text = complete(client).choices[0].text
    stop = text.split()[5]
    answer = complete(client, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_logprobs_of_a_completion_follow_its_tokens(client):
    answer = complete(client, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 24
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob <= 0
        assert top[token] == max(top.values())


def test_logprobs_of_a_chat_have_alternatives(client):
    answer = chat(client, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)


@pytest.mark.parametrize("stream", [False, True])
def test_n_outputs_differ_and_have_their_index(client, stream):
    answer = complete(client, n=3, temperature=1, seed=7, stream=stream)
    texts = {0: "", 1: "", 2: ""}
    for choice in (choice for part in (answer if stream else [answer]) for choice in part.choices):
        texts[choice.index] += choice.text
    assert len(set(texts.values())) == 3


def test_a_seed_repeats_an_output_and_another_one_does_not(client):
    texts = [complete(client, temperature=1, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_repeated_prompt_is_read_from_the_cache(client):
    prompt = "The little dog and the big cat went to the park. " * 8
    first, second = (complete(client, prompt=prompt, max_tokens=4) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert first.choices[0].text == second.choices[0].text


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as raised:
        complete(client, model="no-such-model")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        chat(client, model="no-such-model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused(client, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        complete(client, prompt="dog " * 5000, stream=stream)
    assert raised.value.code == "context_length_exceeded"


def test_a_bad_parameter_is_refused_with_its_name(client):
    with pytest.raises(openai.BadRequestError) as raised:
        complete(client, temperature=-1)
    assert raised.value.param == "temperature"


def ask_with_key(address: str, key: str, ask, **options):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60) as client:
        return ask(client, **options)


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_key_is_refused(guarded_gateway, ask, stream):
    with pytest.raises(openai.AuthenticationError) as raised:
        ask_with_key(guarded_gateway, "wrong", ask, stream=stream)
    assert raised.value.code == "invalid_api_key"


def test_a_right_key_is_accepted(guarded_gateway):
    assert ask_with_key(guarded_gateway, KEY, complete).choices[0].text
