# The package, and its demo as a non-root user:
#
#     docker build -t paceline . && docker run --rm --shm-size 1g paceline
#
# For torch without CUDA: --build-arg PIP_EXTRA_INDEX_URL=... with an index that has such wheels.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL=""
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt /wheels/*.whl \
    && useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /home/trainer
CMD ["paceline", "demo"]
