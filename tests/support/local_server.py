import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

import uvicorn
from identity_engine import identity_generator

from metaphrase.inference import Generator
from metaphrase.serving.app import make_app
from metaphrase.serving.batcher import Batcher
from metaphrase.serving.models import ServedModel
from metaphrase.serving.service import Service


def translators(generators: Mapping[str, Generator], **options) -> Service:
    """Return a service with models for translation, whose names such as en-de are their languages."""
    batcher = Batcher()
    models = [
        ServedModel(name, generator, batcher, languages=tuple(name.split("-")), task="translation")
        for name, generator in generators.items()
    ]
    return Service(models, batcher, **options)


def upper_service(generator: Generator | None = None, **options) -> Service:
    """Return a service with the models en-de and de-en, which write sources in upper case, unless another generator is given."""
    return translators(dict.fromkeys(("en-de", "de-en"), generator or identity_generator(str.upper)), **options)


def demo_service() -> Service:
    batcher = Batcher()
    model = Generator.from_pretrained("runs/demo"), batcher
    return Service([ServedModel("demo", *model, languages=("en", "de"), task="translation")], batcher)


@contextlib.contextmanager
def running(service: Service, **app_options) -> Iterator[str]:
    """Run a server in a thread. Yields its URL."""
    quiet = {"log_config": None, "access_log": False, "timeout_graceful_shutdown": 10}
    server = uvicorn.Server(uvicorn.Config(make_app(service, **app_options), host="127.0.0.1", port=0, **quiet))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
