# syntax=docker/dockerfile:1
# Builds tallyd's image: docker build -t tallyd . ; docs/operations/containers.md describes how to run it.

# Debian 12, as in the final image below: a program needs a C library that is at least as new as the C library of its build.
FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY . .
# The commit for --version, because the context has no repository.
ARG TALLYD_REVISION
# The compiled dependencies stay in the cache from one build to the next.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin tallyd && cp target/release/tallyd /usr/bin/tallyd

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title=tallyd
LABEL org.opencontainers.image.url=https://example.org/tallyd
LABEL org.opencontainers.image.source=https://example.org/tallyd.git
LABEL org.opencontainers.image.licenses="MIT OR Apache-2.0"
# Certificates for TLS, and time zones for boards. The base image has the C library and libgcc.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates tzdata && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/bin/tallyd /usr/bin/tallyd
# With this mode, the user below can read the file, even if the mode in the sources is stricter.
COPY --chmod=644 config.toml /etc/tallyd/config.toml
# The broker library parses a message's headers by recursion, so a thread's stack must be large enough for the deepest headers that fit into a frame.
# This reserves only address space, not memory.
ENV RUST_MIN_STACK=134217728
# With glibc's default number of arenas, the process would keep memory that threads have freed.
ENV MALLOC_ARENA_MAX=2
# An account that nothing else uses, given as a number, so that Kubernetes can see that it is not root (runAsNonRoot).
USER 65532:65532
EXPOSE 8255
# The daemon writes its open batches before it stops. Set a stop timeout longer than [daemon] drain_max_s: docker stop --time 90.
STOPSIGNAL SIGTERM
# Checks only the daemon, not its servers: an unreachable MySQL is no reason to restart the container.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s --retries=3 CMD ["/usr/bin/tallyd", "admin", "healthcheck", "--live"]
ENTRYPOINT ["/usr/bin/tallyd"]
CMD ["run"]
