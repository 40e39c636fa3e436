# syntax=docker/dockerfile:1
# tallyd as an image: docker build -t tallyd . ; docs/operations/containers.md says how it is run.

# Debian 12, as what follows: a program needs a C library that is no older than the one that it was built with.
FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY . .
# The commit for --version: the context has no repository.
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
# Certificates, for TLS, and time zones, for boards. The C library and libgcc are there.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates tzdata && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/bin/tallyd /usr/bin/tallyd
# Readable by the user below, whatever the mode in the sources.
COPY --chmod=644 config.toml /etc/tallyd/config.toml
# A relative password_file is looked for here: where Docker, Podman and Compose put secrets.
ENV CREDENTIALS_DIRECTORY=/run/secrets
# The broker library reads a message's headers by recursion: room for the deepest that fit into a frame. Only address space is reserved.
ENV RUST_MIN_STACK=134217728
# With as many arenas as glibc makes by default, memory that threads have freed stays with the process.
ENV MALLOC_ARENA_MAX=2
# Nobody's account, by number, so that Kubernetes can see that it isn't root (runAsNonRoot).
USER 65532:65532
EXPOSE 8255
# What is open is written first. Longer than [daemon] drain_max_s must whoever stops it wait: docker stop --time 90.
STOPSIGNAL SIGTERM
# Whether it works, not whether its servers do: whoever restarts unhealthy containers must not do so while MySQL is away.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s --retries=3 CMD ["/usr/bin/tallyd", "healthcheck", "--live"]
ENTRYPOINT ["/usr/bin/tallyd"]
CMD ["run"]
