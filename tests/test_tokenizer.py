import itertools
import random

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl.tokenizer import BOS, EOS, WORDS, Tokenizer, merge, train_bpe

# Words with shared beginnings and ends, repeated letters (merges that overlap), characters of two to four bytes.
TEXTS = [
    "the cat sat on the mat, the rat sat on the hat; then they thank the thin cats that hatch.",
    "aaaa aaa aa a aaaaaaa banana bananas ananas",
    "naïve cafés où l'été dure, straße, größer, 東京都 東京 京都, 🙂🙂🙃 🙂",
    "12 + 12 = 24, 1212 + 121 = 1333;   x = 3\n\n\ty = 44\r\n",
]
BPE = Tokenizer.train_bpe(TEXTS, 256 + 100 + 2, bos=True)
BYTES = Tokenizer.bytes(bos=True)
every_kind = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])

# Texts in which merges, control tokens and white space are likely. Old characters only: which of the newest ones are
# letters differs between libraries.
characters = st.one_of(st.sampled_from("aenth sc12+\n 東京🙂é"), st.characters(max_codepoint=0x2FFF))
pieces = st.one_of(st.sampled_from([EOS, BOS, "<eos", "eos>", "<", ">", "the", " cat", "ana", "  "]), characters)
texts = st.lists(pieces, max_size=40).map("".join)
repeatable = settings(derandomize=True, deadline=None, max_examples=200)


# ---- characters and bytes


def test_characters_have_the_ids_of_their_places_in_the_alphabet():
    tokenizer = Tokenizer.characters("0123456789+-*=<>")
    assert tokenizer.encode("3+4=<") == [3, 10, 4, 13, 14]
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (16, None, 17)
    assert tokenizer.decode([3, 10, 4, 16]) == "3+4<eos>"
    assert Tokenizer.characters("ab", bos=True).control == {"<bos>": 2, "<eos>": 3}


def test_an_alphabet_may_hold_characters_of_several_bytes():
    tokenizer = Tokenizer.characters("aé東🙂\n")
    assert tokenizer.encode("🙂a東\né") == [3, 0, 2, 4, 1]
    assert tokenizer.decode([3, 0, 2, 4, 1]) == "🙂a東\né"


def test_unknown_characters_are_an_error_that_names_them():
    tokenizer = Tokenizer.characters("abc")
    with pytest.raises(ValueError, match=r"\['x', 'é'\] in 'aéxb'.*'abc'"):
        tokenizer.encode("aéxb")


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_that_is_empty_or_repeats_itself_is_an_error(alphabet):
    with pytest.raises(ValueError, match=repr(alphabet)):
        Tokenizer.characters(alphabet)


# ---- words

VOCABULARY = ["the", "plot", "was", "very", "dull", "naïve", "."]
SPOKEN = Tokenizer.words(VOCABULARY)


def test_words_have_the_ids_of_their_places_and_hold_the_space_before_them():
    assert SPOKEN.encode(" the plot was dull .") == [0, 1, 2, 4, 6]
    assert SPOKEN.decode([0, 1, 2, 4, 6]) == " the plot was dull ."
    assert (SPOKEN.eos_id, SPOKEN.bos_id, SPOKEN.vocab_size) == (7, None, 8)
    assert Tokenizer.words(["a"], bos=True).encode_prompt(" a") == [1, 0]
    assert SPOKEN.encode("") == [] and SPOKEN.encode_response(" .") == [6, 7]
    assert SPOKEN.encode(" naïve") == [5]


@repeatable
@given(ids=st.lists(st.integers(0, 6)))
def test_words_come_back_from_their_text_and_no_two_of_them_merge(ids):
    assert SPOKEN.encode(SPOKEN.decode(ids)) == ids


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("the plot", r"\['the'\]"),
        (" thethe", r"\[' thethe'\]"),
        (" the boring plot", r"\[' boring'\]"),
        (" dull.", r"\[' dull\.'\]"),
        (" The", r"\[' The'\]"),
        (" t", r"\[' t'\]"),
        (" the  plot", "blanks"),
        (" the ", "blanks"),
        (" the\n plot", "blanks"),
        (" ", "blanks"),
        (" <eos>", r"\[' <eos>'\]"),
    ],
)
def test_what_is_no_word_of_the_vocabulary_is_an_error_that_names_it(text, named):
    with pytest.raises(ValueError, match=rf"no token for {named} in .*knows only ' the plot was"):
        SPOKEN.encode(text)


@pytest.mark.parametrize("vocabulary", [[], ["a", "b", "a"]])
def test_a_vocabulary_that_is_empty_or_repeats_itself_is_an_error(vocabulary):
    with pytest.raises(ValueError, match="at least one word and none twice"):
        Tokenizer.words(vocabulary)


def test_a_tokenizer_of_words_is_saved_and_loaded(tmp_path):
    SPOKEN.save(tmp_path / "words.json")
    loaded = Tokenizer.load(tmp_path / "words.json")
    assert loaded.encode(" the naïve plot .") == [0, 5, 1, 6] and loaded.eos_id == SPOKEN.eos_id


# ---- bytes


def test_a_byte_is_a_token():
    tokenizer = Tokenizer.bytes()
    assert tokenizer.encode("aé🙂") == list("aé🙂".encode())
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.token_bytes(0xC3) == b"\xc3"


# ---- control tokens


@every_kind
@repeatable
@given(text=texts)
def test_text_typed_by_a_user_never_becomes_a_control_token(tokenizer, text):
    assert max(tokenizer.encode(text), default=0) < min(tokenizer.control.values())
    assert tokenizer.encode_prompt(text).count(tokenizer.bos_id) == 1
    assert tokenizer.encode_response(text).count(tokenizer.eos_id) == 1


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, Tokenizer.characters("<>beosx", bos=True)])
def test_control_tokens_are_read_from_text_only_when_asked_for(tokenizer):
    text = "<bos>x<<eos>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(text, allow_control=True)
    x, opening = tokenizer.encode("x<") if tokenizer is not BPE else tokenizer.encode("x") + tokenizer.encode("<")
    assert ids == [tokenizer.bos_id, x, opening, tokenizer.eos_id]


def test_control_tokens_need_no_letters_of_the_alphabet():
    tokenizer = Tokenizer.characters("12")
    with pytest.raises(ValueError, match=r"\['<', '>', 'e', 'o', 's'\]"):
        tokenizer.encode("1<eos>")
    assert tokenizer.encode("1<eos>2", allow_control=True) == [0, 2, 1]
    with pytest.raises(ValueError, match=r"\['<', 'e'\]"):  # a control token taken out of "<e<eos>" leaves these
        tokenizer.encode("<e<eos>", allow_control=True)


# ---- there and back


@every_kind
@repeatable
@given(text=st.one_of(texts, st.text(max_size=30)))
def test_decoding_what_was_encoded_gives_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@repeatable
@given(ids=st.lists(st.integers(0, 17), max_size=30))
def test_encoding_what_was_decoded_gives_the_ids_of_a_character_tokenizer(ids):
    tokenizer = Tokenizer.characters("0123456789+-*=<>", bos=True)
    assert tokenizer.encode(tokenizer.decode(ids), allow_control=True) == ids


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, Tokenizer.characters("aé東🙂\n")], ids=["bytes", "bpe", "c"])
def test_a_saved_tokenizer_comes_back_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(str(tmp_path / "tokenizer.json"))
    assert (loaded.ranks, loaded.pattern, loaded.control) == (tokenizer.ranks, tokenizer.pattern, tokenizer.control)
    assert (loaded.vocab_size, loaded.eos_id, loaded.bos_id) == (
        tokenizer.vocab_size,
        tokenizer.eos_id,
        tokenizer.bos_id,
    )
    for text in TEXTS if tokenizer.knows_all_bytes else ["🙂a東\né"]:
        assert loaded.encode(text) == tokenizer.encode(text)


def test_trap_c4_half_a_character_waits_for_its_other_half():
    stream = Tokenizer.bytes().stream()
    assert [stream.push(0xC3), stream.push(0xA9), stream.close()] == ["", "é", ""]
    stream = Tokenizer.bytes().stream()
    assert [stream.push(0xC3), stream.push(0x61), stream.push(0xC3), stream.close()] == ["", "\ufffda", "", "\ufffd"]


@every_kind
@repeatable
@given(data=st.data())
def test_trap_c4_streamed_text_equals_the_batch_decode(tokenizer, data):
    of_text = texts.map(tokenizer.encode)
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    ids = data.draw(st.one_of(of_text, anything))
    stream = tokenizer.stream()
    assert "".join([stream.push(i) for i in ids] + [stream.close()]) == tokenizer.decode(ids)


# ---- prompt and response


def test_trap_g2_no_token_straddles_the_boundary_between_prompt_and_response():
    ranks = {bytes([b]): b for b in range(256)} | {b" $": 256}
    tokenizer = Tokenizer(ranks, r"(?s).+", bos=True)
    assert tokenizer.encode("p: $5") == [*b"p:", 256, *b"5"]  # the merge is there and would fire
    prompt = tokenizer.encode_prompt("p: ")
    for text in ("$5", "5"):
        response = tokenizer.encode_response(text)
        row = prompt + response
        assert prompt == [tokenizer.bos_id, *b"p: "]  # the same for both responses
        assert tokenizer.decode(response) == text + "<eos>"
        assert [i for i, token in enumerate(row) if token == tokenizer.bos_id] == [0]
        assert [i for i, token in enumerate(row) if token == tokenizer.eos_id] == [len(row) - 1]
        assert response[-1] == tokenizer.eos_id


def test_without_bos_a_prompt_is_its_text():
    tokenizer = Tokenizer.characters("ab")
    assert tokenizer.bos_id is None and tokenizer.encode_prompt("ab") == [0, 1]
    assert tokenizer.encode_response("") == [tokenizer.eos_id]


# ---- byte-pair encoding


def learned(ranks: dict[bytes, int]) -> list[bytes]:
    """The merges in their order; the 256 bytes come first."""
    assert [ranks[bytes([b])] for b in range(256)] == list(range(256))
    assert sorted(ranks.values()) == list(range(len(ranks)))
    return sorted(ranks, key=ranks.get)[256:]


def test_the_trainer_merges_the_most_frequent_pair_first():
    # The words of Sennrich et al. 2016, figure 1, without its end-of-word mark: e-s 9 times, es-t 9, l-o 7 ...
    texts = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    # Then n-e, e-w and w-est, 6 times each: e-w is the smallest.
    assert learned(train_bpe(texts, 5)) == [b"es", b"est", b"lo", b"low", b"ew"]


def test_the_trainer_breaks_ties_by_bytes_and_counts_merged_pieces_anew():
    # aaabdaaabac: aa 4; then a-b 2 and aa-a 2, of which (a, b) is smaller; then aa-ab 2.
    assert learned(train_bpe(["aaabdaaabac"], 3)) == [b"aa", b"ab", b"aaab"]


def test_the_trainer_stops_when_every_word_is_one_token():
    assert learned(train_bpe(["ab"], 100)) == [b"ab"]
    assert learned(train_bpe(["é", "é!"], 100)) == ["é".encode()]  # no merge crosses from a letter to punctuation
    assert learned(train_bpe([], 100)) == learned(train_bpe(["", "a"], 100)) == []
    assert learned(train_bpe(["aa"], 0)) == []


def test_no_merge_crosses_from_one_word_to_the_next():
    for token in learned(train_bpe(["to be or not to be " * 9, "1a1a1a 2b2b", "a, b, c,"], 100)):
        word = token.decode()
        assert " " not in word[1:] and len({character.isdigit() for character in word.strip()}) <= 1, word


def test_training_depends_on_the_texts_alone_and_not_on_their_order():
    trained = train_bpe(TEXTS, 60)
    assert list(train_bpe(TEXTS, 60).items()) == list(trained.items())
    words = [word for text in TEXTS for word in regex.findall(WORDS, text)]
    random.Random(0).shuffle(words)
    # Words that begin with white space stay what they are when they stand alone.
    assert list(train_bpe(iter(words), 60).items()) == list(trained.items())
    assert learned(train_bpe(TEXTS, 30)) == learned(trained)[:30]


def test_a_trained_tokenizer_has_the_size_that_was_asked_for():
    assert (BPE.vocab_size, BPE.bos_id, BPE.eos_id) == (358, 356, 357)
    assert Tokenizer.train_bpe(["aaaa"], 257).vocab_size == 257  # no merge at all
    with pytest.raises(ValueError, match="257"):
        Tokenizer.train_bpe(["aaaa"], 257, bos=True)


def encode_by_hand(text: str, ranks: dict[bytes, int]) -> list[int]:
    """In each word merge, again and again, the neighbours whose concatenation has the lowest rank, leftmost first."""
    ids = []
    for word in regex.findall(WORDS, text):
        parts = [bytes([b]) for b in word.encode()]
        while True:
            candidates = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not candidates:
                break
            _, i = min(candidates)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def encode_in_training_order(text: str, merges: list[tuple[bytes, bytes]], ranks: dict[bytes, int]) -> list[int]:
    """Every merge once, in the order it was learned, on every word."""
    ids = []
    for word in regex.findall(WORDS, text):
        parts = [bytes([b]) for b in word.encode()]
        for pair in merges:
            parts = merge(parts, pair)
        ids += [ranks[part] for part in parts]
    return ids


@repeatable
@given(text=texts)
def test_encoding_applies_the_merges_in_the_order_of_their_ranks(text):
    assert BPE.encode(text) == encode_by_hand(text, BPE.ranks)


def test_a_long_word_is_encoded_like_a_short_one():
    rng = random.Random(0)
    for word in ("ana" * 300, "".join(rng.choices("aenthsc", k=2000))):
        assert BPE.encode(word) == encode_by_hand(word, BPE.ranks)


@repeatable
@given(corpus=st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=5), text=st.text("ab", max_size=24))
def test_a_tokenizer_encodes_as_its_trainer_merged(corpus, text):
    tokenizer = Tokenizer.train_bpe(corpus, 257 + 12)
    assert tokenizer.encode(text) == encode_by_hand(text, tokenizer.ranks)
    for word in corpus:  # what the trainer has seen comes out as it was left there
        assert tokenizer.encode(word) == encode_in_training_order(word, merges_of(corpus, 12), tokenizer.ranks)


def merges_of(corpus: list[str], count: int) -> list[tuple[bytes, bytes]]:
    """The pairs a trainer merges, found by a second trainer that shares nothing with the first but its rule."""
    words = [[bytes([b]) for b in word.encode()] for text in corpus for word in regex.findall(WORDS, text)]
    pairs = []
    for _ in range(count):
        counts = {}
        for word in words:
            for i in range(len(word) - 1):
                counts[word[i], word[i + 1]] = counts.get((word[i], word[i + 1]), 0) + 1
        if not counts:
            break
        most = max(counts.values())
        best = min(pair for pair, n in counts.items() if n == most)
        pairs.append(best)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [word[i] + word[i + 1]]
                i += 1
    return pairs


def test_a_second_trainer_finds_the_same_merges():
    assert [a + b for a, b in merges_of(TEXTS, 100)] == learned(BPE.ranks)
