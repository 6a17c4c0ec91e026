"""A finished run with text in it that would break a page, and a page as a browser would see it."""

import json
import math
from html.parser import HTMLParser

HOSTILE = (
    "</pre><script>alert(1)</script><img src=x onerror=alert(2)> | **b** [red]x[/red] "
    "\x1b[2J \x00 \ud800 é 日本"
)

CONFIG = """\
method: kto
model: {name: org/tiny-chat, dtype: float32, lora: {rank: 16, alpha: null}}
data: {train: [{path: feedback.jsonl}], eval: [{path: held_out.jsonl}], max_length: 1024}
loss: {beta: 0.1}
train: {batch_size: 8, learning_rate: 2.0e-05, seed: 0}
"""
CHANGED = [
    {"setting": "train.batch_size", "value": 8, "origin": "recipe.yaml:7"},
    {"setting": "train.learning_rate", "value": 2.34567e-5, "origin": "command line"},
]
AUDIT = {
    "train": {
        "kind": "judgement",
        "units": 200,
        "classes": {"up": 104, "down": 96},
        "files": [
            {
                "path": "feedback.jsonl",
                "format": "judgement",
                "rows": 203,
                "classes": {"up": 104, "down": 96},
                "too_long": 3,
            }
        ],
        "unused": [
            {
                "kind": "too_long",
                "reason": "longer than max_length",
                "fix": "raise data.max_length",
                "count": 3,
                "rows": ["feedback.jsonl:7", HOSTILE],
            }
        ],
        "prompt_length": {"min": 4, "median": 31.0, "p95": 80, "max": 112},
        "answer_length": {"min": 2, "median": 96.5, "p95": 250, "max": 1300},
        "truncation": {"rows": 203, "too_long": 3},
        "findings": {
            "contradictions": {"count": 2, "rows": ["feedback.jsonl:12 against feedback.jsonl:9"]},
            "length_bias": {"count": 1, "rows": []},
        },
        "ignored_columns": {"judged_by": 203},
        "weights": None,
    },
    "eval": {
        "kind": "judgement",
        "units": 60,
        "classes": {"up": 30, "down": 30},
        "unused": [],
        "findings": {},
    },
}


def evaluation(step, scale):
    rows = [
        {
            "id": f"{i:04x}",
            "origin": f"held_out.jsonl:{i + 1}",
            "label": i % 2 == 0,
            "reward": scale * (math.sin(i * 1.7) + (1 if i % 2 == 0 else -1)),
            "logp": -50.0 - i,
            "prompt": HOSTILE,
            "completion": HOSTILE,
        }
        for i in range(60)
    ]
    metrics = {"loss": 0.5 - 0.1 * scale, "rewards/margins": 2 * scale, "auc": 0.5 + 0.3 * scale}
    return {"step": step, "metrics": metrics, "rows": rows}


def metrics_lines(steps):
    for step in range(1, steps + 1):
        grow = step / steps
        yield {
            "step": step,
            "loss": 0.5 - 0.1 * grow + 0.03 * math.sin(step * 2.1),
            "rewards/chosen": 0.6 * grow,
            "rewards/rejected": -0.5 * grow,
            "rewards/margins": 1.1 * grow,
            "kl": max(0.0, 0.4 * grow - 0.05),
            "kl/raw": 0.4 * grow - 0.05,
            "grad_norm": 1.2 + 0.4 * math.cos(step),
            "lr": 2e-5 * (1 - grow),
            "tokens/s": 480 + 40 * math.sin(step * 0.7),
            "tokens": 900 + step,
            "tokens_seen": 900 * step,
            "micro_batches": 2,
            "padding": 0.1 + 0.01 * math.sin(step),
        }
        if step % 20 == 0:
            yield {
                "step": step,
                "eval/loss": 0.5 - 0.08 * grow,
                "eval/rewards/margins": 0.9 * grow,
                "eval/auc": 0.5 + 0.3 * grow,
            }


def hostile_run(folder):
    """A finished run with hostile text wherever data may come through."""
    (folder / "eval").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics_lines(60)))
    for step, scale in ((0, 0.0), (20, 0.2), (60, 0.5), (100, 0.6)):
        (folder / "eval" / f"step-{step}.json").write_text(json.dumps(evaluation(step, scale)))
    samples = [{"prompt": HOSTILE, "before": "I I I I I", "after": "A short answer."}]
    (folder / "samples.json").write_text(json.dumps(samples))
    run = {
        "command": "valence train recipe.yaml train.batch_size=8",
        "valence": "0.1.0",
        "torch": "2.13",
        "python": "3.11.2",
        "transformers": "5.23",
        "seconds": 192.0,
        "status": "done",
        "changed": CHANGED,
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder


class Page(HTMLParser):
    """Text, tags and entries of lists of a page, as a browser would see them."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.attributes, self.items, self.text, self._inside = [], [], [], "", ""
        self.feed(self.source)

    def section(self, title):
        """The HTML of a section."""
        return self.source.split(f"<h2>{title}</h2>")[1].split("</section>")[0]

    def handle_starttag(self, tag, attrs):
        self._inside = tag
        if tag == "li":
            self.items.append("")
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data
        if self._inside == "li":
            self.items[-1] += data


def charts(page):
    return json.loads(page.source.split('id="charts">')[1].split("</script>")[0])
