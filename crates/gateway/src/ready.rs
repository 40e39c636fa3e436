//! `GET /livez` reports whether the process works. `GET /readyz` reports whether the process can publish events. The
//! log also names each server that fails, with the causes.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{sleep, timeout};

use super::{Gate, Shared};
use tallyd_base::http::json;
use tallyd_base::runtime::retry::Outage;
use tallyd_client::{Client, ClientError};
use tallyd_connect::fate::Fate;
use tallyd_core::chain::Chain;

const ANSWER_MAX: Duration = Duration::from_secs(2);

/// How long `/readyz` repeats the servers' answers, because anyone can send it.
const ANSWERS_KEPT: Duration = Duration::from_secs(1);

const LOOK_EVERY: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
pub(super) enum Server {
    Rabbitmq,
    Redis,
}

impl Server {
    pub(super) const ALL: [Self; 2] = [Self::Rabbitmq, Self::Redis];

    fn name(self) -> &'static str {
        match self {
            Self::Rabbitmq => "RabbitMQ",
            Self::Redis => "Redis",
        }
    }

    fn asking(self) -> &'static str {
        match self {
            Self::Rabbitmq => "asking RabbitMQ",
            Self::Redis => "asking Redis",
        }
    }

    async fn answers(self, client: &Client) -> Result<(), Problem> {
        let asked = async {
            match self {
                Self::Rabbitmq => client.broker_answers().await,
                Self::Redis => client.redis_answers().await,
            }
        };
        timeout(ANSWER_MAX, asked).await.map_err(|_| Problem::Late)?.map_err(Problem::Failed)
    }
}

#[derive(Debug)]
enum Problem {
    Failed(ClientError),
    Late,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => Chain(error).fmt(f),
            Self::Late => write!(f, "no answer within {} s", ANSWER_MAX.as_secs()),
        }
    }
}

impl Problem {
    /// Returns a text for clients without the token. The text lacks the causes, because a cause can contain an address.
    fn without_causes(&self) -> String {
        let fate = match self {
            Self::Failed(ClientError::Broker(error)) => error.fate(),
            Self::Failed(ClientError::Redis(error)) => error.fate(),
            Self::Failed(_) => Fate::Passing,
            Self::Late => return self.to_string(),
        };
        let text = if fate == Fate::Refused { "it refuses the account, see the log" } else { "see the log" };
        text.to_owned()
    }
}

pub(super) async fn watch(gate: Arc<Gate>, server: Server) {
    let mut outage = Outage::new(server.asking());
    loop {
        let pause = match server.answers(&gate.client).await {
            Ok(()) => {
                outage.over();
                LOOK_EVERY
            }
            Err(problem) => outage.failed(&problem),
        };
        tokio::select! {
            () = gate.stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}

/// Whether the gateway is ready for requests.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Ready {
    pub ready: bool,
    /// `running` or `draining`.
    pub state: &'static str,
    /// The reasons why the gateway is not ready.
    pub reasons: Vec<String>,
    /// Always empty. Only a daemon fills this field, for `tallyd admin healthcheck`.
    pub servers: Vec<String>,
}

/// Whether the process works.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Live {
    pub live: bool,
    /// Always empty. Only a daemon fills this field, for `tallyd admin healthcheck`.
    pub stuck: Vec<String>,
}

pub(super) async fn livez() -> Response {
    json(StatusCode::OK, &Live { live: true, stuck: Vec::new() })
}

pub(super) async fn readyz(State(gate): Shared, headers: HeaderMap) -> Response {
    if gate.stop.is_cancelled() {
        return answer("draining", vec!["the gateway is stopping".to_owned()]);
    }
    let may_know = gate.token.as_ref().is_none_or(|token| token.is_in(headers.get(AUTHORIZATION)));
    // A request holds the lock while it asks the servers, and the waiting requests use its answers.
    let mut last = gate.ready.lock().await;
    let kept = last.take().filter(|answers| answers.at.elapsed() < ANSWERS_KEPT);
    let answers = match kept {
        Some(answers) => answers,
        None => Answers::ask(&gate.client).await,
    };
    let reason = |(server, problem): &(Server, Problem)| {
        let problem = if may_know { problem.to_string() } else { problem.without_causes() };
        format!("{} is unavailable: {problem}", server.name())
    };
    let reasons = answers.problems.iter().map(reason).collect();
    *last = Some(answers);
    answer("running", reasons)
}

pub(super) struct Answers {
    at: Instant,
    problems: Vec<(Server, Problem)>,
}

impl Answers {
    async fn ask(client: &Client) -> Self {
        let (broker, redis) = tokio::join!(Server::Rabbitmq.answers(client), Server::Redis.answers(client));
        let answered = [(Server::Rabbitmq, broker), (Server::Redis, redis)];
        let problems = answered.into_iter().filter_map(|(server, answered)| Some((server, answered.err()?))).collect();
        Self { at: Instant::now(), problems }
    }
}

fn answer(state: &'static str, reasons: Vec<String>) -> Response {
    let ready = reasons.is_empty();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &Ready { ready, state, reasons, servers: Vec::new() })
}
