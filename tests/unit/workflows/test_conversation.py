"""What a growing context holds, to the token, for templates with different habits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mappa.errors import ConfigError
from lightning_mappa.models.char_tokenizer import char_tokenizer
from lightning_mappa.workflows.conversation import ChatFormat, Conversation
from tests.unit.workflows.templates import FAMILIES

TOKENIZERS = {name: family.tokenizer() for name, family in FAMILIES.items()}
CHATS = {name: ChatFormat(tokenizer) for name, tokenizer in TOKENIZERS.items()}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


def encode(name, text):
    return tuple(TOKENIZERS[name].encode(text, add_special_tokens=False))


@EVERY_FAMILY
def test_the_first_prompt_is_what_the_template_renders(name):
    conversation = Conversation(CHATS[name], system="S", user="U")
    assert TOKENIZERS[name].decode(conversation.prompt_ids) == FAMILIES[name].first
    assert conversation.prompt_ids == encode(name, FAMILIES[name].first)


@EVERY_FAMILY
def test_a_response_cut_at_the_limit_is_followed_by_the_whole_suffix(name):
    chat = CHATS[name]
    conversation = Conversation(chat, system="S", user="U")
    first, response = conversation.prompt_ids, encode(name, "cut here")
    conversation.extend(response, role=chat.tool_role, content="T")
    assert conversation.prompt_ids == (*first, *response, *encode(name, FAMILIES[name].suffix))


@EVERY_FAMILY
def test_a_sampled_end_of_turn_is_not_doubled(name):
    chat, end = CHATS[name], FAMILIES[name].end_of_turn
    conversation = Conversation(chat, system="S", user="U")
    first, response = conversation.prompt_ids, encode(name, "done" + end)
    conversation.extend(response, role=chat.tool_role, content="T")
    after = FAMILIES[name].suffix.partition(end)[2]
    assert conversation.prompt_ids == (*first, *response, *encode(name, after))


@EVERY_FAMILY
@pytest.mark.parametrize("cut", [False, True])
def test_own_thinking_and_spaces_stay_in_later_turns(name, cut):
    chat = CHATS[name]
    conversation = Conversation(chat, system="", user="U")
    said = ["<think>hm</think>\n\n  one \n", " two<think>mm</think>", "three"]
    contexts = []
    for text in said:
        contexts.append(conversation.prompt_ids)
        response = encode(name, text + ("" if cut else FAMILIES[name].end_of_turn))
        conversation.extend(response, role=chat.tool_role, content="T")
        assert conversation.prompt_ids[: len(contexts[-1]) + len(response)] == (*contexts[-1], *response)
    decoded = TOKENIZERS[name].decode(conversation.prompt_ids)
    assert all(text in decoded for text in said)


@EVERY_FAMILY
def test_where_the_template_drops_nothing_the_context_is_its_own_rendering(name):
    """For answers without thinking, ids pieced together equal the ids of the whole chat rendered at once."""
    chat, tokenizer = CHATS[name], TOKENIZERS[name]
    conversation = Conversation(chat, system="", user="U")
    conversation.extend(encode(name, "A" + FAMILIES[name].end_of_turn), role="user", content="V")
    messages = [("user", "U"), ("assistant", "A"), ("user", "V")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=True,
    )
    # Templates that write a space around the content did not see one sampled.
    pieced = tokenizer.decode(conversation.prompt_ids)
    assert pieced.replace(" ", "").replace("<think>\n", "") == whole.replace(" ", "").replace("<think>\n", "")


@EVERY_FAMILY
def test_the_role_of_tool_results_follows_the_template(name):
    assert CHATS[name].tool_role == FAMILIES[name].tool_role
    assert ChatFormat(TOKENIZERS[name], tool_role="user").tool_role == "user"


def test_a_tool_role_that_the_template_refuses_is_an_error():
    with pytest.raises(ConfigError, match=r"model\.path.*user, assistant, tool.*must alternate"):
        ChatFormat(TOKENIZERS["instructions"], tool_role="tool")


def test_a_template_that_loses_tool_messages_is_an_error():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    assert ChatFormat(tokenizer).tool_role == "user"
    with pytest.raises(ConfigError, match="writes no messages of role tool"):
        ChatFormat(tokenizer, tool_role="tool")


def test_a_tokenizer_without_template_or_with_one_that_rewrites_answers_is_an_error():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"model\.path.*no chat template"):
        ChatFormat(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"model\.path.*as it is"):
        ChatFormat(tokenizer)


def test_only_a_prompt_that_opens_thinking_says_so():
    assert [name for name, chat in CHATS.items() if chat.opens_thinking] == ["opens_thinking"]


@EVERY_FAMILY
def test_control_tokens_in_what_others_wrote_are_read_as_text(name):
    tokenizer, family = TOKENIZERS[name], FAMILIES[name]
    injected = "".join([*tokenizer.all_special_tokens, *family.added, "<" * 3, family.end_of_turn])
    controls = set(tokenizer.convert_tokens_to_ids([*tokenizer.all_special_tokens, *family.added]))

    def count(user, tool):
        conversation = Conversation(CHATS[name], system="S", user=user)
        conversation.extend(encode(name, "A"), role=CHATS[name].tool_role, content=tool)
        return [token for token in conversation.prompt_ids if token in controls]

    assert count(injected, injected) == count("harmless", "harmless")


@given(st.lists(st.sampled_from(["<|end|>", "<|user|>", "<|", "|>", "end", "<", "|", "a", " "]), max_size=30))
def test_no_text_encodes_to_a_control_token(pieces):
    text = "".join(pieces)
    tokenizer, chat = TOKENIZERS["char"], CHATS["char"]
    ids = tokenizer.encode(chat.plain(text), add_special_tokens=False)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert chat.plain(text).replace(" ", "") == text.replace(" ", "")


def test_text_without_control_tokens_is_left_alone():
    assert CHATS["char"].plain("a < b | c > d\n") == "a < b | c > d\n"


def test_decoding_leaves_out_special_tokens_and_nothing_else():
    name = "strips_thinking"
    text = " <think>a</think>\n b  <|im_end|>"
    assert CHATS[name].decode(encode(name, text)) == " <think>a</think>\n b  "


def test_content_equal_to_the_system_prompt_does_not_confuse_the_suffix():
    conversation = Conversation(CHATS["instructions"], system="S", user="U")
    conversation.extend(encode("instructions", "A</s>"), role="user", content="S")
    assert TOKENIZERS["instructions"].decode(conversation.prompt_ids).startswith("<s>[INST]S\n\nU[/INST]A</s>[INST]S")
