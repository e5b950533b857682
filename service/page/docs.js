// The API's description: receives the service's OpenAPI document, hands it to Swagger UI; sends a key where one is asked for.

const form = document.getElementById("docs-key");
const field = document.getElementById("key");
let key = "";

const ui = window.SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#swagger-ui",
  layout: "BaseLayout",
  presets: [window.SwaggerUIBundle.presets.apis],
  deepLinking: true,
  requestInterceptor(request) {
    if (key) request.headers.Authorization ??= `Bearer ${key}`;
    return request;
  },
  responseInterceptor(response) {
    if (response.url.endsWith("/openapi.json")) form.hidden = response.status !== 401;
    return response;
  },
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key = field.value.trim();
  field.value = "";
  ui.specActions.download();
});
