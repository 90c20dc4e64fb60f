//! `/workers`, and the older routes for the same.
//!
//! Takes descriptions and names of workers, gives what the control thread made of them. Never waits for a worker.

use std::collections::{BTreeSet, HashMap};

use axum::Json;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::form::Form;
use super::{Admin, SILENCE, ending, error};
use crate::config::{Config, WorkerSpec, WorkerUrl, choice, fields};
use crate::control::command::{Added, Command, Left};
use crate::control::fleet::{Listed, Rank, Refusal, Source};
use crate::limits::MAX_ADMIN_BODY_BYTES;
use crate::shared::vitals::Health;

/// `GET /workers`, all or those of `?model=`, `?role=` or `?state=`.
pub async fn list(State(admin): State<Admin>, uri: Uri) -> Response {
    let wanted = match query(&uri, &["model", "role", "worker_type", "state"]) {
        Ok(wanted) => wanted,
        Err(refused) => return *refused,
    };
    let strange = wanted.iter().find_map(|(key, value)| {
        let known = match key.as_str() {
            "model" => return None,
            "state" => choice(value, &Health::ALL.map(Health::name)).map(drop),
            _ => fields::role(value).map(drop),
        };
        known.err().map(|mistake| format!("{key}: {mistake}"))
    });
    if let Some(mistake) = strange {
        return wrong(&mistake);
    }
    let Ok(mut workers) = admin.commands.give(Command::List).await else { return ending() };
    workers.retain(|worker| {
        wanted.iter().all(|(key, value)| match key.as_str() {
            "model" => worker.models.iter().any(|model| **model == **value),
            "state" => worker.state == value,
            _ => worker.role == value,
        })
    });
    Json(Listing { total: workers.len(), stats: stats(&workers), workers }).into_response()
}

/// Written as it is: thousands of entries would first be copied into values.
#[derive(Serialize)]
struct Listing {
    total: usize,
    stats: Value,
    workers: Vec<Listed>,
}

fn stats(workers: &[Listed]) -> Value {
    let of = |role: &str| workers.iter().filter(|worker| worker.role == role).count();
    let models: BTreeSet<&str> = workers.iter().flat_map(|worker| worker.models.iter().map(|model| &**model)).collect();
    json!({
        "total_workers": workers.len(),
        "healthy_workers": workers.iter().filter(|worker| worker.is_healthy).count(),
        "total_models": models.len(),
        "total_load": workers.iter().map(|worker| u64::from(worker.in_flight)).sum::<u64>(),
        "by_type": {"regular": of("regular"), "prefill": of("prefill"), "decode": of("decode")},
    })
}

/// `GET /list_workers`
pub async fn urls(State(admin): State<Admin>) -> Response {
    let Ok(workers) = admin.commands.give(Command::List).await else { return ending() };
    let urls: Vec<&str> = workers.iter().map(|worker| &*worker.url).collect();
    Json(json!({"urls": urls})).into_response()
}

/// `GET /workers/{id or URL}`
pub async fn show(State(admin): State<Admin>, Path(name): Path<String>) -> Response {
    match shown(&admin, &name).await {
        Ok(worker) => Json(worker).into_response(),
        Err(refused) => refused,
    }
}

/// The worker of a name: one of its ranks if the name says which, else the engine as a whole.
async fn shown(admin: &Admin, name: &str) -> Result<Listed, Response> {
    let asked = name.to_owned();
    let ranks = admin.commands.give(|reply| Command::Show(asked, reply)).await.map_err(|_| ending())?;
    let exact = ranks.iter().find(|rank| *rank.id == *name && rank.worker_id != rank.id || *rank.url == *name);
    match exact.or(ranks.first()) {
        Some(rank) if exact.is_some() || ranks.len() == 1 => Ok(rank.clone()),
        Some(first) => Ok(whole(first.clone(), &ranks)),
        None => Err(refused(name, &Refusal::Unknown)),
    }
}

/// An engine with its ranks together.
fn whole(first: Listed, ranks: &[Listed]) -> Listed {
    let in_flight = ranks.iter().map(|rank| rank.in_flight).sum();
    Listed {
        id: first.worker_id.clone(),
        url: first.url.rsplit_once('@').map_or(first.url.clone(), |(url, _)| url.into()),
        dp: first.dp.map(|Rank { size, .. }| Rank { rank: None, size }),
        in_flight,
        load: in_flight,
        kv_usage: ranks.iter().filter_map(|rank| rank.kv_usage).reduce(f64::max),
        waiting: ranks.iter().filter_map(|rank| rank.waiting).reduce(u32::saturating_add),
        shed: ranks.iter().all(|rank| rank.shed),
        selected_total: ranks.iter().map(|rank| rank.selected_total).sum(),
        ..first
    }
}

/// `POST /workers`
pub async fn add(State(admin): State<Admin>, headers: HeaderMap, body: Body) -> Response {
    let form = match form(&headers, body).await {
        Ok(form) => form,
        Err(refused) => return *refused,
    };
    match described(&form, &admin.config()) {
        Ok(spec) => register(&admin, spec).await,
        Err(refused) => *refused,
    }
}

/// `POST /add_worker?url=…`
pub async fn add_by_query(State(admin): State<Admin>, uri: Uri) -> Response {
    let said = match query(&uri, &["url", "worker_type", "api_key", "model_id", "bootstrap_port"]) {
        Ok(said) => said,
        Err(refused) => return *refused,
    };
    let value = |(name, text): (String, String)| match text.parse::<u16>() {
        Ok(port) if name == "bootstrap_port" => (name, json!(port)),
        _ => (name, json!(text)),
    };
    let said = said.into_iter().map(value).collect();
    let spec = Form::read(&said).map_err(|mistakes| Box::new(wrong(&mistakes)));
    match spec.and_then(|form| described(&form, &admin.config())) {
        Ok(spec) => register(&admin, spec).await,
        Err(refused) => *refused,
    }
}

fn described(form: &Form, config: &Config) -> Result<WorkerSpec, Box<Response>> {
    if form.patch.draining.is_some() {
        return Err(Box::new(wrong("draining: a worker that is added takes requests; leave it out")));
    }
    form.spec(config).map_err(|mistake| Box::new(wrong(&mistake)))
}

async fn register(admin: &Admin, spec: WorkerSpec) -> Response {
    let url = spec.url.clone();
    let added = admin.commands.give(|reply| Command::Add(Source::Admin, Box::new(spec), reply)).await;
    let Added { id, was_leaving } = match added {
        Ok(Ok(added)) => added,
        Ok(Err(why)) => return refused(&url, &why),
        Err(_) => return ending(),
    };
    let (id, location) = (id.to_string(), format!("/workers/{id}"));
    let message = match was_leaving {
        false => "The worker is known; it gets requests when its first probe has succeeded.",
        true => "The worker was leaving and stays; it gets requests when a probe has succeeded.",
    };
    let body = json!({
        "status": "accepted", "id": id, "worker_id": id, "url": url, "location": location, "message": message,
    });
    (StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(body)).into_response()
}

/// `PUT /workers/{id or URL}`: all settings; those that are left out have their defaults. Without `url`, which the older
/// peers do not want, it is the same as PATCH.
pub async fn put(State(admin): State<Admin>, Path(name): Path<String>, headers: HeaderMap, body: Body) -> Response {
    let form = match form(&headers, body).await {
        Ok(form) => form,
        Err(refused) => return *refused,
    };
    if form.url.is_none() {
        return change(&admin, name, form).await;
    }
    let spec = match described(&form, &admin.config()) {
        Ok(spec) => spec,
        Err(refused) => return *refused,
    };
    let asked = name.clone();
    let done = admin.commands.give(|reply| Command::Replace(asked, Box::new(spec), reply)).await;
    changed(&admin, &name, done).await
}

/// `PATCH /workers/{id or URL}`: the settings that are given.
pub async fn patch(State(admin): State<Admin>, Path(name): Path<String>, headers: HeaderMap, body: Body) -> Response {
    match form(&headers, body).await {
        Ok(form) => change(&admin, name, form).await,
        Err(refused) => *refused,
    }
}

async fn change(admin: &Admin, name: String, form: Form) -> Response {
    let fixed = form.fixed().or(form.url.is_some().then_some("url"));
    if let Some(what) = fixed {
        return refused(&name, &Refusal::Fixed(what));
    }
    let asked = name.clone();
    let done = admin.commands.give(|reply| Command::Patch(asked, Box::new(form.patch), reply)).await;
    changed(admin, &name, done).await
}

async fn changed<E>(admin: &Admin, name: &str, done: Result<Result<impl Sized, Refusal>, E>) -> Response {
    match done {
        Ok(Ok(_)) => show(State(admin.clone()), Path(name.to_owned())).await,
        Ok(Err(why)) => refused(name, &why),
        Err(_) => ending(),
    }
}

/// `DELETE /workers/{id or URL}`: it finishes what it has and is removed then; with `?force=true` it is removed at once.
pub async fn remove(State(admin): State<Admin>, Path(name): Path<String>, uri: Uri) -> Response {
    let said = match query(&uri, &["force"]) {
        Ok(said) => said,
        Err(refused) => return *refused,
    };
    let force = match said.get("force").map(String::as_str) {
        None | Some("false" | "0") => false,
        Some("" | "true" | "1") => true,
        Some(_) => return wrong("force: is neither true nor false; give one of them"),
    };
    dismiss(&admin, name, force).await
}

/// `POST /remove_worker?url=…`
pub async fn remove_by_query(State(admin): State<Admin>, uri: Uri) -> Response {
    match query(&uri, &["url"]) {
        Ok(mut said) => match said.remove("url") {
            Some(url) => dismiss(&admin, url, false).await,
            None => wrong("url: is missing; add ?url=http://…"),
        },
        Err(refused) => *refused,
    }
}

async fn dismiss(admin: &Admin, name: String, force: bool) -> Response {
    let asked = name.clone();
    let (status, said, id, message) =
        match admin.commands.give(|reply| Command::Remove { name: asked, force, reply }).await {
            Ok(Ok(Left::Draining(id))) => {
                let message = "The worker finishes what it has and is removed then.";
                (StatusCode::ACCEPTED, "draining", id.to_string(), message)
            }
            Ok(Ok(Left::Removed(id))) => {
                (StatusCode::OK, "removed", id.to_string(), "The worker is removed; what it has goes on to its end.")
            }
            Ok(Err(why)) => return refused(&name, &why),
            Err(_) => return ending(),
        };
    (status, Json(json!({"status": said, "id": id, "worker_id": id, "message": message}))).into_response()
}

/// What was said in the body.
async fn form(headers: &HeaderMap, body: Body) -> Result<Form, Box<Response>> {
    let said = object(headers, body).await?;
    Form::read(&said).map_err(|mistakes| Box::new(wrong(&mistakes)))
}

async fn object(headers: &HeaderMap, body: Body) -> Result<Map<String, Value>, Box<Response>> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        let why = "Send a JSON object with Content-Type: application/json.";
        return Err(Box::new(error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", why)));
    }
    let Ok(Ok(bytes)) = timeout(SILENCE, to_bytes(body, MAX_ADMIN_BODY_BYTES)).await else {
        let why = format!("The body is longer than {MAX_ADMIN_BODY_BYTES} bytes, or has not come whole.");
        return Err(Box::new(error(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", &why)));
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(said)) => Ok(said),
        Ok(_) => Err(Box::new(wrong("The body is no JSON object; send one like {\"url\": \"http://10.0.0.1:30000\"}"))),
        Err(e) => Err(Box::new(wrong(&format!("The body is no JSON: {e}; send an object")))),
    }
}

/// The query's pairs, of which each may come once.
fn query(uri: &Uri, known: &[&str]) -> Result<HashMap<String, String>, Box<Response>> {
    let mut said = HashMap::new();
    for pair in uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (name, value) = (unescaped(name), unescaped(value));
        if !known.contains(&name.as_str()) {
            let told = format!("{name}: no such parameter; the parameters are {}", known.join(", "));
            return Err(Box::new(wrong(&told)));
        }
        if said.insert(name.clone(), value).is_some() {
            return Err(Box::new(wrong(&format!("{name}: is given twice; give it once"))));
        }
    }
    Ok(said)
}

/// A part of a query as it is meant: `%41` is `A`, `+` a space.
fn unescaped(text: &str) -> String {
    percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned()
}

fn wrong(message: &str) -> Response {
    error(StatusCode::BAD_REQUEST, "bad_worker", message)
}

fn refused(name: &str, why: &Refusal) -> Response {
    let (status, code) = match why {
        Refusal::Unknown => (StatusCode::NOT_FOUND, "no_such_worker"),
        Refusal::Known | Refusal::OtherRole(_) => (StatusCode::CONFLICT, "worker_exists"),
        Refusal::Full => (StatusCode::SERVICE_UNAVAILABLE, "too_many_workers"),
        Refusal::BadUrl(_) | Refusal::Wrong(_) | Refusal::Fixed(_) => return wrong(&why.to_string()),
    };
    // A name that was no URL may hold anything.
    let name = WorkerUrl::parse(name).map_or_else(|_| "The worker".to_owned(), |url| url.to_string());
    error(status, code, &format!("{name}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read_as_they_are_meant() {
        for (text, meant) in [
            ("http%3A%2F%2Fa%3a1", "http://a:1"),
            ("a+b", "a b"),
            ("%", "%"),
            ("%4", "%4"),
            ("%zz%+1", "%zz% 1"),
            ("%C3%A4", "ä"),
            ("%ff", "\u{fffd}"),
        ] {
            assert_eq!(unescaped(text), meant);
        }
        let ask = |text: &str| query(&format!("/workers?{text}").parse().unwrap(), &["model", "x"]);
        assert_eq!(ask("model=a%26b&x").unwrap().len(), 2);
        assert!(ask("modle=a").is_err() && ask("x=1&x=1").is_err() && ask("").unwrap().is_empty());
    }
}
