"""An archive of Java's classes, read and checked once for all: with it a Java for Spark starts in two thirds of the time.

`python -m delivery.correlation.archive` makes it (`make setup` does), from what a small analysis loads. It lies below
`sys.prefix`, in the environment that Spark is installed in, takes about 200 MB and goes with that environment. It is for one
Java and the jars as they are; for others there is none until one is made, and everything works as well without.
"""

# ruff: noqa: T201 a job that people start tells them what it does

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from delivery.correlation.errors import NoJavaError
from delivery.correlation.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Train = Callable[[Path], Path]
_ENDING: Final = ".jsa"
_ROWS: Final = 60_000
"""With their ids and details more than what counts as a small log."""
_FEW: Final = 600
"""A small log: its queries are interpreted, which takes other classes."""
_PATIENCE_S: Final = 300
# What does not fit is left alone in silence: Java would tell of it among what a command prints.
_QUIET: Final = "-Xshare:auto -Xlog:cds*=off"
_TRAINING: Final = f"{_QUIET} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def default_folder() -> Path:
    """Where archives lie."""
    return Path(sys.prefix) / "share" / "rooms"


def archive_options(home: Path | None, folder: Path) -> str:
    """What makes the Java at `home` (None: the one on the path) use its archive in that folder; empty where there is none."""
    found = _whole(folder, _key(home))
    return "" if found is None else f'{_QUIET} "-XX:SharedArchiveFile={found}"'


def _train_apart(folder: Path) -> Path:
    """Train in a process of its own; the file that its Java then has written, if it has."""
    made = folder / "classes"
    arguments = f"--driver-java-options '{_TRAINING} \"-XX:ArchiveClassesAtExit={made}\"' pyspark-shell"
    subprocess.run(
        [sys.executable, "-m", "delivery.correlation.archive", str(folder)],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": arguments},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_PATIENCE_S,
        check=False,
    )
    return made


def make(home: Path | None, folder: Path, *, train: Train = _train_apart) -> Path | None:
    """Make the archive for this Java, unless it is there; None where there can be none. OSError, TimeoutExpired.

    Takes about a minute. Nobody finds it before it is whole; those for other Javas and jars are removed.
    """
    key = _key(home)
    if key is None or (found := _whole(folder, key)) is not None:
        return None if key is None else found
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
        made = train(Path(making))
        if not made.exists():
            return None
        # Java takes one that was cut short for whole, and dies of it: its size is part of its name.
        whole = folder / f"{key}-{made.stat().st_size}{_ENDING}"
        made.replace(whole)
    for other in folder.glob(f"*{_ENDING}"):
        if other != whole:
            with suppress(OSError):
                other.unlink()
    return whole


def _whole(folder: Path, key: str | None) -> Path | None:
    if key is None or any(character in str(folder) for character in "\"'\\"):
        return None
    found = (one for one in folder.glob(f"{key}-*{_ENDING}") if one.name == f"{key}-{one.stat().st_size}{_ENDING}")
    return next(found, None)


def _key(home: Path | None) -> str | None:
    """Other for every Java, and whenever Spark's jars are others or stand in another order; None where there are none."""
    try:
        told = sorted(_told(_runtime(home))) + list(_told(_jars()))
    except (OSError, NoJavaError):
        return None
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def _told(files: Iterator[Path]) -> Iterator[str]:
    for file in files:
        status = file.stat()
        yield f"{file.name} {status.st_size} {status.st_mtime_ns}"


def _runtime(home: Path | None) -> Iterator[Path]:
    java = shutil.which("java") if home is None else str(home / "bin" / "java")
    if java is None:
        raise NoJavaError("there is no Java")
    root = Path(java).resolve().parent.parent
    yield from (file for file in (root / "release", root / "lib" / "modules", Path(java)) if file.exists())


def _jars() -> Iterator[Path]:
    """In the order in which Java finds them."""
    home = os.environ.get("SPARK_HOME")
    if home is None:
        spec = importlib.util.find_spec("pyspark")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("there is no Spark")
        home = str(Path(spec.origin).parent)
    return Path(home, "jars").iterdir()


def _train(folder: Path) -> None:
    """Two whole analyses, of many rows and of few, in a Java that writes its classes down when it ends; waits until it has."""
    from pyspark import SparkContext

    from delivery.correlation.analysis import Analysis
    from delivery.correlation.session import spark_session

    with spark_session() as spark:
        for count in (_ROWS, _FEW):
            segments, out = str(folder / f"segments-{count}"), str(folder / f"out-{count}")
            _rows(spark, count).write.partitionBy("dt", "hr").parquet(segments)
            Analysis(spark, segments_at=segments, out=out, tell=lambda _: None).run(now=datetime.now(UTC))
    gateway: Any = SparkContext._gateway  # noqa: SLF001 - there is no public way
    gateway.shutdown()
    # The Java of a plain start ends with its input.
    gateway.proc.stdin.close()
    gateway.proc.wait()


def _rows(spark: "SparkSession", count: int) -> "DataFrame":
    """So many rows of messages with a failed attempt and a good one."""
    kinds = ("published", "enqueued", "attempted", "retry_scheduled", "attempted", "delivered")
    steps = len(kinds)
    named = ", ".join(f"'{kind}'" for kind in kinds)
    about = "if(step = 0, null, {})"
    columns = {
        "ts": "timestamp_millis(1767225600000 + message * 1000 + step * 20)",
        "kind": f"element_at(array({named}), step + 1)",
        "room_id": "1",
        "message_hi": "shiftleft(1767225600000 + message * 1000, 16)",
        "message_lo": "xxhash64(message)",
        "message_id": "sha2(cast(message as string), 256)",
        "writer_id": "1",
        "writer_seq": "id + 1",
        "xid": "id",
        "subscription_id": about.format("concat('subscription ', message % 7)"),
        "delivery_hi": about.format("shiftleft(1767225600000 + message * 1000, 16)"),
        "delivery_lo": about.format("xxhash64(message, 1)"),
        "delivery_id": about.format("sha2(cast(message as string), 256)"),
        "generation": about.format("0"),
        "attempt": about.format("if(step > 2, 1, 0)"),
        "event_version": "1",
        "fanout": "if(step = 0, 1, null)",
        "delay_ms": "if(step = 3, 20L, null)",
        "latency_ms": "if(step in (2, 4), cast(step as float), null)",
        "http_status": "if(step = 2, 503, 200)",
        "schema_version": "1",
        "event_type": "'type'",
        "target_host": about.format("'host'"),
        "worker_host": "'host'",
        "error_class": "if(step = 2, 'status', null)",
        "detail": "sha2(cast(id as string), 512)",
    }
    rows = spark.range(count).selectExpr("id", f"id div {steps} as message", f"cast(id % {steps} as int) as step")
    made = rows.selectExpr(*(f"{said} as {name}" for name, said in columns.items()))
    return made.selectExpr("*", "date_format(ts, 'yyyy-MM-dd') as dt", "date_format(ts, 'HH') as hr")


def main() -> int:
    """Exit code 0, whether this Java can have an archive or not; 1 where it cannot be put anywhere."""
    if len(sys.argv) > 1:
        _train(Path(sys.argv[1]))
        return 0
    try:
        made = make(find_java(), default_folder())
    except NoJavaError as exc:
        print(f"no archive of Java's classes: {exc}")
        return 0
    except (OSError, subprocess.TimeoutExpired) as exc:
        print(f"no archive of Java's classes: {exc}", file=sys.stderr)
        return 1
    print("there is no Spark, or its Java makes no archives" if made is None else f"Java's classes lie in {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
