import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts as Java does unless it is asked otherwise: with `Upgrade: h2c` on the first request of a connection. */
class Publish {
    public static void main(String[] given) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (String path : new String[] {"/v1/rooms/7/messages", "/else", "/v1/rooms/7/messages"}) {
            for (boolean chunked : new boolean[] {false, true}) {
                String body = "from Java " + chunked;
                HttpRequest.BodyPublisher publisher = chunked
                    ? HttpRequest.BodyPublishers.ofInputStream(() -> new java.io.ByteArrayInputStream(body.getBytes()))
                    : HttpRequest.BodyPublishers.ofString(body);
                HttpRequest request = HttpRequest.newBuilder(URI.create(given[0] + path))
                    .header("Authorization", "Bearer ours").POST(publisher).build();
                HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
                System.out.println(answer.version() + " " + answer.statusCode() + " " + answer.body());
            }
        }
    }
}
