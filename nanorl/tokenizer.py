"""Text to token ids and back: tiktoken encodings that need no network.

Four kinds: one token a character or a word (the toy worlds), one token a byte, and byte-pair encoding (Sennrich et al.
2016; bytes as in GPT-2) trained here by a trainer short enough to read. All of them become a `tiktoken.Encoding`.

Control tokens (`<bos>`, `<eos>`) have ids behind the ordinary ones. Text never turns into one of them, whatever a user
types, unless `allow_control=True` asks for it.
"""

from __future__ import annotations

import base64
import codecs
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import regex
import tiktoken

EOS = "<eos>"
BOS = "<bos>"
ANY_CHARACTER = r"(?s)."
SPACED_WORD = r" ?\S+"
# Words keep their leading space, numbers and punctuation stand apart: the split of GPT-2, without its contractions.
WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer:
    """A tiktoken encoding and the ids the training loop needs.

    `vocab_size` counts ordinary and control tokens; `eos_id` ends a response; `bos_id` (or None) opens a prompt.
    """

    def __init__(self, ranks: dict[bytes, int], pattern: str, *, bos: bool = False):
        self.ranks, self.pattern, self.bos = ranks, pattern, bos
        control = [BOS, EOS] if bos else [EOS]
        self.control = {text: len(ranks) + i for i, text in enumerate(control)}
        self.encoding = tiktoken.Encoding("nanorl", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.control)
        self.vocab_size = len(ranks) + len(control)
        self.eos_id = self.control[EOS]
        self.bos_id = self.control.get(BOS)
        self.knows_all_bytes = all(bytes([b]) in ranks for b in range(256))

    @classmethod
    def characters(cls, alphabet: str, *, bos: bool = False) -> Tokenizer:
        """One token for each character of `alphabet`, in its order. Other characters are an error when encoded."""
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ValueError(f"the alphabet must hold at least one character and none twice, got {alphabet!r}")
        return cls({c.encode(): i for i, c in enumerate(alphabet)}, ANY_CHARACTER, bos=bos)

    @classmethod
    def words(cls, vocabulary: Sequence[str], *, bos: bool = False) -> Tokenizer:
        """One token for each word, the space before it included: " the plot was dull ." is five tokens."""
        if not vocabulary or len(set(vocabulary)) != len(vocabulary):
            raise ValueError(f"the vocabulary must hold at least one word and none twice, got {list(vocabulary)}")
        return cls({f" {word}".encode(): i for i, word in enumerate(vocabulary)}, SPACED_WORD, bos=bos)

    @classmethod
    def bytes(cls, *, bos: bool = False) -> Tokenizer:
        """One token for each byte of the UTF-8 text: 256 tokens that can write anything."""
        return cls({bytes([b]): b for b in range(256)}, ANY_CHARACTER, bos=bos)

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int, *, bos: bool = False) -> Tokenizer:
        """Byte-pair encoding learned from `texts`; `vocab_size` counts the 256 bytes, the merges and control tokens."""
        merges = vocab_size - 256 - (2 if bos else 1)
        if merges < 0:
            raise ValueError(f"vocab_size must leave room for 256 bytes and the control tokens, not {vocab_size}")
        return cls(train_bpe(texts, merges), WORDS, bos=bos)

    def encode(self, text: str, *, allow_control: bool = False) -> list[int]:
        """Token ids of `text`. Control tokens written in it are plain characters unless `allow_control`."""
        if not self.knows_all_bytes:
            plain = regex.sub("|".join(map(regex.escape, self.control)), "", text) if allow_control else text
            pieces = regex.findall(self.pattern, plain)
            unknown = sorted({piece for piece in pieces if not self.knows(piece)})
            if unknown or "".join(pieces) != plain:
                known = "".join(token.decode() for token in self.ranks)
                raise ValueError(f"no token for {unknown or 'blanks'} in {text!r}: this tokenizer knows only {known!r}")
        return (
            self.encoding.encode(text, allowed_special="all") if allow_control else self.encoding.encode_ordinary(text)
        )

    def knows(self, piece: str) -> bool:
        """Whether it is a token, or each of its characters is one."""
        return piece.encode() in self.ranks or all(c.encode() in self.ranks for c in piece)

    def encode_prompt(self, text: str) -> list[int]:
        """<bos> (where the tokenizer has one) and the text."""
        return ([] if self.bos_id is None else [self.bos_id]) + self.encode(text)

    def encode_response(self, text: str) -> list[int]:
        """The text and one <eos>. Encoded apart from the prompt, so no token straddles the boundary."""
        return [*self.encode(text), self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control tokens are written out, bytes that are no UTF-8 become U+FFFD."""
        return self.encoding.decode([int(i) for i in ids])

    def token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(int(token))

    def stream(self) -> TextStream:
        """A decoder that takes one id at a time."""
        return TextStream(self)

    def save(self, path: str | Path) -> None:
        ranks = [base64.b64encode(token).decode() for token in sorted(self.ranks, key=self.ranks.get)]
        Path(path).write_text(json.dumps({"pattern": self.pattern, "bos": self.bos, "ranks": ranks}))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        saved = json.loads(Path(path).read_text())
        ranks = {base64.b64decode(token): i for i, token in enumerate(saved["ranks"])}
        return cls(ranks, saved["pattern"], bos=saved["bos"])


class TextStream:
    """Decodes ids one by one; half a character waits until its other bytes arrive."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(self.tokenizer.token_bytes(token))

    def close(self) -> str:
        """What is left: U+FFFD for a character that never became whole."""
        return self.decoder.decode(b"", final=True)


def train_bpe(texts: Iterable[str], merges: int) -> dict[bytes, int]:
    """Merge the most frequent pair of neighbours, `merges` times. Returns token -> rank (its id).

    Of equally frequent pairs the smallest (by bytes) goes first, so the result depends on the texts alone. Stops
    early when every word is one token.
    """
    words = Counter(word for text in texts for word in regex.findall(WORDS, text))
    pieces = {word: [bytes([b]) for b in word.encode()] for word in words}
    ranks = {bytes([b]): b for b in range(256)}
    for _ in range(merges):
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(pieces[word], pieces[word][1:], strict=False):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks[b"".join(best)] = len(ranks)
        for word in words:
            pieces[word] = merge(pieces[word], best)
    return ranks


def merge(pieces: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """Replace every occurrence of `pair`, from left to right, by its concatenation."""
    merged, i = [], 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
            merged.append(pieces[i] + pieces[i + 1])
            i += 2
        else:
            merged.append(pieces[i])
            i += 1
    return merged
