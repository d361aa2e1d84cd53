//! `response_format`: a JSON schema as a grammar over the model's tokens, by llguidance.

use super::{App, fields::Fields, schema};
use crate::{ApiError, driver::Model, error::shown};
use axum::http::StatusCode;
use headway_engine::{sampling::Constraint, text::Tokenizer};
use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};

/// The most time that a client waits for its schema to be compiled, and for the turn to.
const COMPILE_TIME: Duration = Duration::from_secs(5);
const TURN_TIME: Duration = Duration::from_secs(10);
/// Schemas are compiled by recursion, a level of them in a few KiB.
const STACK_BYTES: usize = 32 << 20;

/// What an answer must be.
#[derive(Debug)]
pub struct Format {
    schema: Value,
    /// The parameter that the schema came in.
    param: &'static str,
}

#[derive(Deserialize)]
struct Given {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<Schema>,
}

#[derive(Deserialize)]
struct Schema {
    schema: Option<Value>,
}

impl Format {
    /// Takes `response_format`; `None`: text.
    ///
    /// # Errors
    /// 400 for another kind, or a schema that is missing or has more than it may have.
    pub fn take(f: &mut Fields) -> Result<Option<Self>, ApiError> {
        let Some(given) = f.take::<Given>("response_format")? else { return Ok(None) };
        match (given.kind.as_str(), given.json_schema) {
            ("text", _) => Ok(None),
            ("json_object", _) => {
                Ok(Some(Self { schema: json!({"type": "object"}), param: "response_format" }))
            }
            ("json_schema", Some(Schema { schema: Some(schema) })) => {
                let param = "response_format.json_schema.schema";
                schema::check(&schema).map_err(|why| ApiError::param(param, format!("{param}: {why}")))?;
                Ok(Some(Self { schema, param }))
            }
            ("json_schema", _) => {
                let param = "response_format.json_schema.schema";
                Err(ApiError::param(param, format!("{param} is missing; give the schema of the answer")))
            }
            (kind, _) => {
                let param = "response_format.type";
                let why = format!("{param} is {:?}; text, json_object or json_schema is needed", shown(kind));
                Err(ApiError::param(param, why))
            }
        }
    }
}

impl App {
    /// The constraint that a format puts on an answer. One at a time is made, on a thread of its own, which keeps its turn
    /// until it is done: a schema that takes long holds other schemas up, and nothing else.
    ///
    /// # Errors
    /// A schema that is none or takes too long, 503 while others do, a model without a tokenizer.
    pub(crate) async fn constraint(
        self: &Arc<Self>,
        format: Option<Format>,
        model: &Arc<Model>,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let Some(format) = format else { return Ok(None) };
        let turn = tokio::time::timeout(TURN_TIME, Arc::clone(&self.compiling).acquire_owned()).await;
        let turn = turn.map_err(|_| {
            let why = "other requests' schemas are being compiled; try again later";
            ApiError::unavailable(why).retry_after(5)
        })?;
        let (app, model, param) = (Arc::clone(self), Arc::clone(model), format.param);
        let (tell, told) = tokio::sync::oneshot::channel();
        let compile = move || {
            let _turn = turn;
            let grammars = app.grammars.get_or_init(|| Grammars::new(model.tokenizer()?));
            let made = grammars.as_ref().map_err(Clone::clone).and_then(|g| g.constraint(&format));
            // Its client may be gone.
            let _ = tell.send(made);
        };
        let failed = |why: &str| {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{why}; the server goes on"))
        };
        let thread = std::thread::Builder::new().name("headway-grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(compile).map_err(|e| failed(&format!("there is no thread for the schema: {e}")))?;
        match tokio::time::timeout(COMPILE_TIME, told).await {
            Ok(Ok(made)) => made.map(Some),
            Ok(Err(_)) => Err(failed("compiling the schema failed")),
            Err(_) => {
                let seconds = COMPILE_TIME.as_secs();
                let why =
                    format!("{param}: the schema takes more than {seconds} s to compile; make it simpler");
                Err(ApiError::param(param, why))
            }
        }
    }
}

/// Makes grammars for a model's tokens; takes a moment to make, and is kept.
pub struct Grammars {
    factory: ParserFactory,
}

impl Grammars {
    /// For a tokenizer.
    ///
    /// # Errors
    /// A vocabulary without an end-of-sequence token.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, ApiError> {
        let broken =
            |why: String| ApiError::unprocessable("response_format", format!("this model can't: {why}"));
        let eos = tokenizer.eos_ids();
        let Some(&first) = eos.first() else {
            return Err(broken("its tokenizer names no token that ends an answer".into()));
        };
        let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size() as u32).map(|id| word(tokenizer, id)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie.with_eos_tokens(eos)));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| broken(e.to_string()))?;
        factory.quiet();
        // Errors without the answer so far.
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory })
    }

    /// The constraint of an answer.
    ///
    /// # Errors
    /// 400 for a schema that is none, that asks for what isn't supported, or that is too large for its first token to be
    /// found in the time that a token has.
    pub fn constraint(&self, format: &Format) -> Result<Box<dyn Constraint>, ApiError> {
        let grammar = TopLevelGrammar::from_json_schema(format.schema.clone());
        let parser = self.factory.create_parser(grammar);
        let refused = |why: String| ApiError::param(format.param, format!("{}: {why}", format.param));
        let parser = parser.map_err(|e| refused(format!("{e:#}")))?;
        let mut answer = Json { matcher: Matcher::new(Ok(parser)), mask: SimpleVob::default() };
        // Here it holds nobody up, and the answers of a call have it in common.
        answer.allowed().map_err(refused)?;
        Ok(Box::new(answer))
    }
}

/// Bytes of a token as the trie wants them: special ones are marked, and so are never text.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    if !tokenizer.is_special(id) {
        return tokenizer.token_bytes(id).to_vec();
    }
    let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    bytes.extend(tokenizer.id_to_token(id).unwrap_or_default().into_bytes());
    bytes
}

/// An answer's place in its grammar.
struct Json {
    matcher: Matcher,
    mask: SimpleVob,
}

impl std::fmt::Debug for Json {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Json").finish_non_exhaustive()
    }
}

impl Constraint for Json {
    fn allowed(&mut self) -> Result<&[u32], String> {
        self.mask = self.matcher.compute_mask_or_eos().map_err(|e| e.to_string())?;
        Ok(self.mask.as_slice())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.matcher.is_stopped() {
            true => Ok(()),
            false => self.matcher.consume_token(token).map_err(|e| e.to_string()),
        }
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(Self { matcher: self.matcher.deep_clone(), mask: self.mask.clone() })
    }
}
