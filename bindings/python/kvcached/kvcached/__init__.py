"""The Python interface of kvcached 0.1.6, over the elastic memory of kvik: for programs that call it directly.

This package has kvcached's name and is installed only where it is asked for, as `kvik-kvcached`. Where kvcached itself is
installed too, importing it raises: which of the files on the disk are whose is not known then.
"""

from importlib import metadata

__version__ = "0.1.6+kvik"


def refuse_the_other() -> None:
    try:
        version = metadata.version("kvcached")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"kvcached {version} and kvik-kvcached are both installed, and have the same package; allowed: one of them. "
        "Uninstall both, and install the one that you want"
    )


refuse_the_other()
