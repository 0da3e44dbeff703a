# The search as a container, on a CPU: docker build -t nofuss --build-arg TORCH_INDEX=URL . (after python -m build, which
# makes dist/*.whl). URL is PyTorch's index of CPU wheels, as pytorch.org states it for pip.
#   docker run -v "$PWD/photos:/photos:ro" -v runs:/data nofuss train /photos --out /data/run
#   docker run -v "$PWD/photos:/photos:ro" -v runs:/data -p 127.0.0.1:8000:8000 nofuss serve /data/run --host 0.0.0.0
# --host 0.0.0.0 is within the container; -p 127.0.0.1:… lets this machine in only. The address that `serve` prints has
# the token. For a network put a proxy with TLS in front (SECURITY.md).
FROM python:3.13-slim AS build
ARG TORCH_INDEX
COPY dist/*.whl /tmp/
RUN python -m venv /opt/nofuss \
 && /opt/nofuss/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
      torch==2.13.0+cpu \
 && /opt/nofuss/bin/pip install --no-cache-dir /tmp/*.whl

FROM python:3.13-slim
COPY --from=build /opt/nofuss /opt/nofuss
RUN useradd --create-home --uid 10001 nofuss \
 && install -d -o nofuss -g nofuss /data
ENV PATH=/opt/nofuss/bin:$PATH \
    NOFUSS_CACHE=/data/.cache \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
# Without a token the page answers 403: the server is there. Other commands than serve do not listen, and are not checked.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/'); sys.exit(c.getresponse().status not in (200, 403))"]
ENTRYPOINT ["nofuss"]
CMD ["--help"]
