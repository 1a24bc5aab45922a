"""The functions of `train.py` that read rows with clips of sound."""

from __future__ import annotations

TRANSCRIPT_PROCESSOR_LINES = """\
processor = AutoProcessor.from_pretrained({source}{hub})
if LANGUAGE:  # such as "french"; else the transcripts begin as the tokenizer has it
    processor.tokenizer.set_prefix_tokens(language=LANGUAGE, task="transcribe")
"""
READ_CLIPS = '''\
def read_file(path):
    """Samples of a file from -1 to 1, [time, channels], and how many there are in a second."""
    try:
        with wave.open(str(path)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = np.frombuffer(file.readframes(file.getnframes()), dtype=np.uint8)
    except (wave.Error, EOFError) as error:
        try:
            import soundfile
        except ImportError:
            raise ValueError(f"{path}: {error}; pip install soundfile to read it") from None
        return soundfile.read(path, dtype="float32", always_2d=True)
    if width == 1:  # from 0 to 255
        return data.reshape(-1, channels).astype(np.float32) / 128 - 1, rate
    wide = np.zeros((len(data) // width, 4), dtype=np.uint8)
    wide[:, 4 - width :] = data.reshape(-1, width)
    samples = wide.view("<i4").astype(np.float32) / 2**31
    return samples.reshape(-1, channels), rate


def read_clip(clip, rate):
    """The samples of one channel of a clip, `rate` in a second."""
    if isinstance(clip, dict):
        samples, own_rate = np.array(clip["array"], dtype=np.float32), clip["sampling_rate"]
    else:
        samples, own_rate = read_file(HERE / clip)
    if samples.ndim > 1:
        samples = samples.mean(axis=1)
    if own_rate == rate:
        return samples
    # Its spectrum is cut, or filled with zeros, as scipy.signal.resample does.
    number = round(len(samples) * rate / own_rate)
    resampled = np.fft.irfft(np.fft.rfft(samples), number) * (number / len(samples))
    return resampled.astype(np.float32)


def clip_seconds(clip):
    """How long a clip lasts, from the header of its file."""
    if isinstance(clip, dict):
        return len(clip["array"]) / clip["sampling_rate"]
    try:
        with wave.open(str(HERE / clip)) as file:
            return file.getnframes() / file.getframerate()
    except (wave.Error, EOFError):
        samples, rate = read_file(HERE / clip)
        return len(samples) / rate


'''
TRANSCRIPT_ROWS = '''\
def read_rows(path, processor):
    """The rows of a JSONL file: clips and labels; clips are read batch by batch."""
    rows, too_long, tokenizer = [], 0, processor.tokenizer
    longest_s = processor.feature_extractor.chunk_length
    start = tokenizer.prefix_tokens[0]  # which the model puts before the labels itself
    if not path.exists():
        raise SystemExit(f"{{path}}: is missing; put rows there, JSON lines of audio, text")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                labels = tokenizer(row["text"])["input_ids"]
                labels = labels[labels[0] == start :]
                if clip_seconds(row["audio"]) > longest_s or len(labels) > SEQ_LEN:
                    too_long += 1
                    continue
                rows.append({{"audio": row["audio"], "labels": labels}})
            except Exception as error:
                kind = type(error).__name__
                raise SystemExit(f"{{path}}:{{number}}: {{kind}}: {{error}}") from error
    if too_long:
        few = f"{{too_long}} of {{too_long + len(rows)}} rows"
        say(f"{{path}}: {{few}} are left out: longer than {{longest_s}} s, or than SEQ_LEN")
    return rows


class TranscriptBatches:
    """Reads the clips of a batch, of which the processor makes mel frames; pads the labels."""

    def __init__(self, processor):
        self.extract = processor.feature_extractor

    def __call__(self, rows):
        rate = self.extract.sampling_rate
        clips = [read_clip(row["audio"], rate) for row in rows]
        batch = self.extract(clips, sampling_rate=rate, return_tensors="pt")
        longest = max(len(row["labels"]) for row in rows)
        padded = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
        return {{"input_features": batch["input_features"]{cast}, "labels": torch.tensor(padded)}}


'''
AUDIO_ROWS = '''\
def audio_tokens(processor, audio):
    """Tokens that the processor writes for a clip; more than SEQ_LEN where it would cut it."""
    extract, seconds = processor.feature_extractor, clip_seconds(audio)
    if seconds > extract.chunk_length:
        return SEQ_LEN + 1
    samples = round(seconds * extract.sampling_rate)
    return tokens_of_frames(processor, -(-samples // extract.hop_length))


@lru_cache(maxsize=None)
def tokens_of_frames(processor, frames):
    """Tokens for so many mel frames, tried with silence."""
    extract = processor.feature_extractor
    silence = np.zeros(frames * extract.hop_length, dtype=np.float32)
    options = {"sampling_rate": extract.sampling_rate}
    made = processor(text=[processor.audio_token], audio=[silence], audio_kwargs=options)
    return len(made["input_ids"][0])


'''
AUDIO_BATCHES = '''\
class AudioBatches:
    """Reads the clips of a batch; the processor makes token ids and mel frames."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, rows):
        rate = self.processor.feature_extractor.sampling_rate
        clips = [read_clip(audio, rate) for row in rows for audio in row["audios"]]
        batch = self.processor(
            text=[row["text"] for row in rows],
            audio=clips or None,
            text_kwargs={
                "add_special_tokens": False,
                "padding": True,
                "truncation": True,  # of rows without clips
                "max_length": SEQ_LEN,
            },
            audio_kwargs={"sampling_rate": rate},
            return_tensors="pt",
        )
        return with_labels(batch, rows)


'''
